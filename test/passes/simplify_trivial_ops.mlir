// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file | filecheck %s

// One function per rewrite, by the rewrite's name; chains and cases that must stay follow.

// CHECK-LABEL: @to_same_type
// CHECK-NEXT: return %arg0 : tensor<4x8xf32>
func.func @to_same_type(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.reshape %x : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}

// -----

// CHECK-LABEL: @reshape_of_reshape
// CHECK-NEXT: %[[R:.*]] = stablehlo.reshape %arg0 {alpa.follow = 0 : i64} : (tensor<4x8xf32>) -> tensor<32xf32>
// CHECK-NEXT: return %[[R]]
func.func @reshape_of_reshape(%x: tensor<4x8xf32>) -> tensor<32xf32> {
  %0 = stablehlo.reshape %x : (tensor<4x8xf32>) -> tensor<2x16xf32>
  %1 = stablehlo.reshape %0 : (tensor<2x16xf32>) -> tensor<32xf32>
  return %1 : tensor<32xf32>
}

// -----

// CHECK-LABEL: @reshape_of_unit_dims
// CHECK-NEXT: return %arg0
func.func @reshape_of_unit_dims(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.broadcast_in_dim %x, dims = [1, 3] : (tensor<4x8xf32>) -> tensor<1x4x1x8xf32>
  %1 = stablehlo.reshape %0 : (tensor<1x4x1x8xf32>) -> tensor<4x8xf32>
  return %1 : tensor<4x8xf32>
}

// -----

// What swaps dimensions, or repeats elements, is no reshape.
// CHECK-LABEL: @reshape_of_other_broadcasts
// CHECK-COUNT-2: stablehlo.reshape
func.func @reshape_of_other_broadcasts(%x: tensor<4x8xf32>) -> (tensor<32xf32>, tensor<64xf32>) {
  %0 = stablehlo.broadcast_in_dim %x, dims = [2, 1] : (tensor<4x8xf32>) -> tensor<1x8x4xf32>
  %1 = stablehlo.reshape %0 : (tensor<1x8x4xf32>) -> tensor<32xf32>
  %2 = stablehlo.broadcast_in_dim %x, dims = [1, 2] : (tensor<4x8xf32>) -> tensor<2x4x8xf32>
  %3 = stablehlo.reshape %2 : (tensor<2x4x8xf32>) -> tensor<64xf32>
  return %1, %3 : tensor<32xf32>, tensor<64xf32>
}

// -----

// CHECK-LABEL: @transpose_by_identity
// CHECK-NEXT: return %arg0
func.func @transpose_by_identity(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.transpose %x, dims = [0, 1] : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}

// -----

// CHECK-LABEL: @transpose_of_transpose
// CHECK-NEXT: %[[T:.*]] = stablehlo.transpose %arg0, dims = [2, 0, 1] {alpa.follow = 0 : i64} : (tensor<2x3x4xf32>) -> tensor<4x2x3xf32>
// CHECK-NEXT: return %[[T]]
func.func @transpose_of_transpose(%x: tensor<2x3x4xf32>) -> tensor<4x2x3xf32> {
  %0 = stablehlo.transpose %x, dims = [1, 2, 0] : (tensor<2x3x4xf32>) -> tensor<3x4x2xf32>
  %1 = stablehlo.transpose %0, dims = [1, 2, 0] : (tensor<3x4x2xf32>) -> tensor<4x2x3xf32>
  return %1 : tensor<4x2x3xf32>
}

// -----

// CHECK-LABEL: @convert_to_same_type
// CHECK-NEXT: return %arg0
func.func @convert_to_same_type(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.convert %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @convert_of_exact_convert
// CHECK-NEXT: %[[C:.*]] = stablehlo.convert %arg1 {alpa.follow = 0 : i64} : (tensor<4xi8>) -> tensor<4xi64>
// CHECK-NEXT: return %arg0, %[[C]]
func.func @convert_of_exact_convert(%x: tensor<4xf16>, %i: tensor<4xi8>) -> (tensor<4xf16>, tensor<4xi64>) {
  %0 = stablehlo.convert %x : (tensor<4xf16>) -> tensor<4xf32>
  %1 = stablehlo.convert %0 : (tensor<4xf32>) -> tensor<4xf16>
  %2 = stablehlo.convert %i : (tensor<4xi8>) -> tensor<4xi32>
  %3 = stablehlo.convert %2 : (tensor<4xi32>) -> tensor<4xi64>
  return %1, %3 : tensor<4xf16>, tensor<4xi64>
}

// -----

// CHECK-LABEL: @convert_that_rounds_stays
// CHECK-COUNT-8: stablehlo.convert
func.func @convert_that_rounds_stays(%x: tensor<4xf32>, %b: tensor<4xbf16>, %i: tensor<4xi32>, %u: tensor<4xui8>)
    -> (tensor<4xf32>, tensor<4xbf16>, tensor<4xi8>, tensor<4xui8>) {
  %0 = stablehlo.convert %x : (tensor<4xf32>) -> tensor<4xf16>
  %1 = stablehlo.convert %0 : (tensor<4xf16>) -> tensor<4xf32>
  %2 = stablehlo.convert %b : (tensor<4xbf16>) -> tensor<4xf16>
  %3 = stablehlo.convert %2 : (tensor<4xf16>) -> tensor<4xbf16>
  %4 = stablehlo.convert %i : (tensor<4xi32>) -> tensor<4xf64>
  %5 = stablehlo.convert %4 : (tensor<4xf64>) -> tensor<4xi8>
  %6 = stablehlo.convert %u : (tensor<4xui8>) -> tensor<4xi8>
  %7 = stablehlo.convert %6 : (tensor<4xi8>) -> tensor<4xui8>
  return %1, %3, %5, %7 : tensor<4xf32>, tensor<4xbf16>, tensor<4xi8>, tensor<4xui8>
}

// -----

// CHECK-LABEL: @bitcast_to_same_type
// CHECK-NEXT: return %arg0
func.func @bitcast_to_same_type(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.bitcast_convert %x : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @broadcast_to_same_type
// CHECK-NEXT: %[[B:.*]] = stablehlo.broadcast_in_dim %arg0, dims = [1, 0]
// CHECK-NEXT: return %arg0, %[[B]]
func.func @broadcast_to_same_type(%x: tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>) {
  %0 = stablehlo.broadcast_in_dim %x, dims = [0, 1] : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = stablehlo.broadcast_in_dim %x, dims = [1, 0] : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0, %1 : tensor<4x4xf32>, tensor<4x4xf32>
}

// -----

// CHECK-LABEL: @broadcast_of_broadcast
// CHECK-NEXT: %[[B:.*]] = stablehlo.broadcast_in_dim %arg0, dims = [2] {alpa.follow = 0 : i64} : (tensor<4xf32>) -> tensor<3x2x4xf32>
// CHECK-NEXT: return %[[B]]
func.func @broadcast_of_broadcast(%x: tensor<4xf32>) -> tensor<3x2x4xf32> {
  %0 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<4xf32>) -> tensor<2x4xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [1, 2] : (tensor<2x4xf32>) -> tensor<3x2x4xf32>
  return %1 : tensor<3x2x4xf32>
}

// -----

// CHECK-LABEL: @slice_of_everything
// CHECK-NEXT: return %arg0
func.func @slice_of_everything(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.slice %x [0:4, 0:8] : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}

// -----

// CHECK-LABEL: @dynamic_slice_of_everything
// CHECK-NEXT: return %arg0
func.func @dynamic_slice_of_everything(%x: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> {
  %0 = stablehlo.dynamic_slice %x, %i, sizes = [4] : (tensor<4xf32>, tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @dynamic_update_of_everything
// CHECK-NEXT: return %arg1
func.func @dynamic_update_of_everything(%x: tensor<4xf32>, %u: tensor<4xf32>, %i: tensor<i32>) -> tensor<4xf32> {
  %0 = stablehlo.dynamic_update_slice %x, %u, %i : (tensor<4xf32>, tensor<4xf32>, tensor<i32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A cut at one end and padding at the other keep the type, not the value.
// CHECK-LABEL: @pad_by_nothing
// CHECK-NEXT: %[[P:.*]] = stablehlo.pad %arg0, %arg1, low = [1], high = [-1]
// CHECK-NEXT: return %arg0, %[[P]]
func.func @pad_by_nothing(%x: tensor<4xf32>, %v: tensor<f32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = stablehlo.pad %x, %v, low = [0], high = [0], interior = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %1 = stablehlo.pad %x, %v, low = [1], high = [-1], interior = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @concatenate_of_one
// CHECK-NEXT: return %arg0
func.func @concatenate_of_one(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.concatenate %x, dim = 0 : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @reverse_of_nothing
// CHECK-NEXT: %[[R:.*]] = stablehlo.reverse %arg0, dims = [1]
// CHECK-NEXT: return %arg0, %[[R]]
func.func @reverse_of_nothing(%x: tensor<1x4xf32>) -> (tensor<1x4xf32>, tensor<1x4xf32>) {
  %0 = stablehlo.reverse %x, dims = [0] : tensor<1x4xf32>
  %1 = stablehlo.reverse %x, dims = [1] : tensor<1x4xf32>
  return %0, %1 : tensor<1x4xf32>, tensor<1x4xf32>
}

// -----

// CHECK-LABEL: @inverse_of_itself
// CHECK-NEXT: return %arg0
func.func @inverse_of_itself(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.negate %x : tensor<4xf32>
  %1 = stablehlo.negate %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @not_of_not
// CHECK-NEXT: return %arg0
func.func @not_of_not(%x: tensor<4xi1>) -> tensor<4xi1> {
  %0 = stablehlo.not %x : tensor<4xi1>
  %1 = stablehlo.not %0 : tensor<4xi1>
  return %1 : tensor<4xi1>
}

// -----

// CHECK-LABEL: @add_zero
// CHECK-NEXT: return %arg0, %arg0, %arg1
func.func @add_zero(%i: tensor<4xi32>, %x: tensor<4xf32>) -> (tensor<4xi32>, tensor<4xi32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %zeros = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<i32>) -> tensor<4xi32>
  %negative = stablehlo.constant dense<-0.0> : tensor<4xf32>
  %0 = stablehlo.add %i, %zeros : tensor<4xi32>
  %1 = stablehlo.add %zeros, %i : tensor<4xi32>
  %2 = stablehlo.add %x, %negative : tensor<4xf32>
  return %0, %1, %2 : tensor<4xi32>, tensor<4xi32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @subtract_zero
// CHECK-NEXT: return %arg0, %arg1
func.func @subtract_zero(%i: tensor<4xi32>, %x: tensor<4xf32>) -> (tensor<4xi32>, tensor<4xf32>) {
  %0 = stablehlo.constant dense<0> : tensor<4xi32>
  %1 = stablehlo.constant dense<0.0> : tensor<4xf32>
  %2 = stablehlo.subtract %i, %0 : tensor<4xi32>
  %3 = stablehlo.subtract %x, %1 : tensor<4xf32>
  return %2, %3 : tensor<4xi32>, tensor<4xf32>
}

// -----

// -0.0 + 0.0 = 0.0, -0.0 - -0.0 = 0.0, and 0 - x is no identity.
// CHECK-LABEL: @zero_that_changes_the_sign_of_zero_stays
// CHECK: stablehlo.add
// CHECK: stablehlo.subtract
// CHECK: stablehlo.subtract
func.func @zero_that_changes_the_sign_of_zero_stays(%i: tensor<4xi32>, %x: tensor<4xf32>)
    -> (tensor<4xf32>, tensor<4xf32>, tensor<4xi32>) {
  %positive = stablehlo.constant dense<0.0> : tensor<4xf32>
  %negative = stablehlo.constant dense<-0.0> : tensor<4xf32>
  %zero = stablehlo.constant dense<0> : tensor<4xi32>
  %0 = stablehlo.add %x, %positive : tensor<4xf32>
  %1 = stablehlo.subtract %x, %negative : tensor<4xf32>
  %2 = stablehlo.subtract %zero, %i : tensor<4xi32>
  return %0, %1, %2 : tensor<4xf32>, tensor<4xf32>, tensor<4xi32>
}

// -----

// CHECK-LABEL: @multiply_by_one
// CHECK-NEXT: return %arg0, %arg1, %arg2
func.func @multiply_by_one(%i: tensor<4xi32>, %x: tensor<4xbf16>, %p: tensor<4xi1>) -> (tensor<4xi32>, tensor<4xbf16>, tensor<4xi1>) {
  %0 = stablehlo.constant dense<1> : tensor<4xi32>
  %1 = stablehlo.constant dense<1.0> : tensor<4xbf16>
  %2 = stablehlo.constant dense<true> : tensor<4xi1>
  %3 = stablehlo.multiply %0, %i : tensor<4xi32>
  %4 = stablehlo.multiply %x, %1 : tensor<4xbf16>
  %5 = stablehlo.multiply %p, %2 : tensor<4xi1>
  return %3, %4, %5 : tensor<4xi32>, tensor<4xbf16>, tensor<4xi1>
}

// -----

// CHECK-LABEL: @divide_by_one
// CHECK: %[[D:.*]] = stablehlo.divide
// CHECK-NEXT: return %arg0, %[[D]]
func.func @divide_by_one(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.divide %x, %0 : tensor<4xf32>
  %2 = stablehlo.divide %0, %x : tensor<4xf32>
  return %1, %2 : tensor<4xf32>, tensor<4xf32>
}

// -----

// The bindings cannot read a complex constant: such ops are left alone.
// CHECK-LABEL: @complex_constant_stays
// CHECK: stablehlo.multiply
func.func @complex_constant_stays(%x: tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>> {
  %0 = stablehlo.constant dense<(1.0, 0.0)> : tensor<4xcomplex<f32>>
  %1 = stablehlo.multiply %x, %0 : tensor<4xcomplex<f32>>
  return %1 : tensor<4xcomplex<f32>>
}

// -----

// CHECK-LABEL: @select_of_equal_values
// CHECK-NEXT: return %arg1
func.func @select_of_equal_values(%p: tensor<4xi1>, %x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.select %p, %x, %x : tensor<4xi1>, tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @select_by_constant
// CHECK-NEXT: return %arg0, %arg1
func.func @select_by_constant(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %true = stablehlo.constant dense<true> : tensor<i1>
  %false = stablehlo.constant dense<false> : tensor<4xi1>
  %0 = stablehlo.select %true, %x, %y : tensor<i1>, tensor<4xf32>
  %1 = stablehlo.select %false, %x, %y : tensor<4xi1>, tensor<4xf32>
  return %0, %1 : tensor<4xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: @element_of_tuple
// CHECK-NEXT: return %arg1
func.func @element_of_tuple(%x: tensor<4xf32>, %y: tensor<2xi32>) -> tensor<2xi32> {
  %0 = stablehlo.tuple %x, %y : tuple<tensor<4xf32>, tensor<2xi32>>
  %1 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<4xf32>, tensor<2xi32>>) -> tensor<2xi32>
  return %1 : tensor<2xi32>
}

// -----

// The sum starts at its initial value: for floats the addition of 0.0 stays, for integers it goes.
// CHECK-LABEL: @reduce_over_nothing
// CHECK: %[[B:.*]] = stablehlo.broadcast_in_dim
// CHECK-NEXT: %[[A:.*]] = stablehlo.add %[[B]], %arg0
// CHECK-NEXT: return %[[A]], %arg1
func.func @reduce_over_nothing(%x: tensor<4xf32>, %i: tensor<4xi32>) -> (tensor<4xf32>, tensor<4xi32>) {
  %0 = stablehlo.constant dense<0.0> : tensor<f32>
  %1 = stablehlo.constant dense<0> : tensor<i32>
  %2 = stablehlo.reduce(%x init: %0) applies stablehlo.add across dimensions = [] : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %3 = stablehlo.reduce(%i init: %1) applies stablehlo.add across dimensions = [] : (tensor<4xi32>, tensor<i32>) -> tensor<4xi32>
  return %2, %3 : tensor<4xf32>, tensor<4xi32>
}

// -----

// CHECK-LABEL: @batch_norm_training
// CHECK-NOT: batch_norm
// CHECK: %[[SUM:.*]] = stablehlo.reduce(%arg0 init: %{{.*}}) applies stablehlo.add across dimensions = [0, 1, 2]
// CHECK: %[[SQUARE:.*]] = stablehlo.multiply %arg0, %arg0
// CHECK: stablehlo.reduce(%[[SQUARE]]
// CHECK: %[[MEAN:.*]] = stablehlo.divide %[[SUM]]
// CHECK: %[[VAR:.*]] = stablehlo.subtract
// CHECK: stablehlo.rsqrt %{{.*}} : tensor<2x3x3x8xf16>
// CHECK: %[[Y:.*]] = stablehlo.add %{{.*}} : tensor<2x3x3x8xf16>
// CHECK-NEXT: return %[[Y]], %[[MEAN]], %[[VAR]]
func.func @batch_norm_training(%x: tensor<2x3x3x8xf16>, %scale: tensor<8xf16>, %offset: tensor<8xf16>)
    -> (tensor<2x3x3x8xf16>, tensor<8xf16>, tensor<8xf16>) {
  %0:3 = "stablehlo.batch_norm_training"(%x, %scale, %offset) {epsilon = 1.0e-3 : f32, feature_index = 3 : i64}
    : (tensor<2x3x3x8xf16>, tensor<8xf16>, tensor<8xf16>) -> (tensor<2x3x3x8xf16>, tensor<8xf16>, tensor<8xf16>)
  return %0#0, %0#1, %0#2 : tensor<2x3x3x8xf16>, tensor<8xf16>, tensor<8xf16>
}

// -----

// CHECK-LABEL: @batch_norm_inference
// CHECK: %[[EPS:.*]] = stablehlo.constant dense<1.000000e-03> : tensor<8xf32>
// CHECK: stablehlo.add %arg4, %[[EPS]]
// CHECK: %[[R:.*]] = stablehlo.rsqrt
// CHECK: stablehlo.multiply %arg1, %[[R]]
// CHECK: stablehlo.broadcast_in_dim %{{.*}}, dims = [1]
func.func @batch_norm_inference(%x: tensor<2x8xf32>, %scale: tensor<8xf32>, %offset: tensor<8xf32>, %mean: tensor<8xf32>, %var: tensor<8xf32>) -> tensor<2x8xf32> {
  %0 = "stablehlo.batch_norm_inference"(%x, %scale, %offset, %mean, %var) {epsilon = 1.0e-3 : f32, feature_index = 1 : i64}
    : (tensor<2x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<2x8xf32>
  return %0 : tensor<2x8xf32>
}

// -----

// The gradients of scale and offset are not used: what only they need is not there.
// CHECK-LABEL: @batch_norm_grad
// CHECK-NOT: batch_norm
// CHECK: %[[N:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<2x8xf32>
// CHECK: stablehlo.multiply %arg4, %[[N]]
// CHECK: return
func.func @batch_norm_grad(%x: tensor<2x8xf32>, %scale: tensor<8xf32>, %mean: tensor<8xf32>, %var: tensor<8xf32>, %dy: tensor<2x8xf32>) -> tensor<2x8xf32> {
  %0:3 = "stablehlo.batch_norm_grad"(%x, %scale, %mean, %var, %dy) {epsilon = 1.0e-3 : f32, feature_index = 1 : i64}
    : (tensor<2x8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<8xf32>, tensor<2x8xf32>) -> (tensor<2x8xf32>, tensor<8xf32>, tensor<8xf32>)
  return %0#0 : tensor<2x8xf32>
}

// -----

// A chain ends where its beginning is: three become none.
// CHECK-LABEL: @chain_to_nothing
// CHECK-NEXT: return %arg0
func.func @chain_to_nothing(%x: tensor<2x3x4xf32>) -> tensor<2x3x4xf32> {
  %0 = stablehlo.transpose %x, dims = [1, 2, 0] : (tensor<2x3x4xf32>) -> tensor<3x4x2xf32>
  %1 = stablehlo.transpose %0, dims = [1, 2, 0] : (tensor<3x4x2xf32>) -> tensor<4x2x3xf32>
  %2 = stablehlo.transpose %1, dims = [1, 2, 0] : (tensor<4x2x3xf32>) -> tensor<2x3x4xf32>
  return %2 : tensor<2x3x4xf32>
}

// -----

// The first reshape has another user and stays.
// CHECK-LABEL: @chain_with_another_user
// CHECK-NEXT: %[[R:.*]] = stablehlo.reshape %arg0
// CHECK-NEXT: return %[[R]], %arg0
func.func @chain_with_another_user(%x: tensor<4x8xf32>) -> (tensor<32xf32>, tensor<4x8xf32>) {
  %0 = stablehlo.reshape %x : (tensor<4x8xf32>) -> tensor<32xf32>
  %1 = stablehlo.reshape %0 : (tensor<32xf32>) -> tensor<4x8xf32>
  return %0, %1 : tensor<32xf32>, tensor<4x8xf32>
}

// -----

// CHECK-LABEL: @dead_ops
// CHECK-NEXT: stablehlo.custom_call @print
// CHECK-NEXT: return
func.func @dead_ops(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.tanh %x : tensor<4x8xf32>
  %1 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [1] : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x4xf32>
  %2 = stablehlo.custom_call @print(%x) {has_side_effect = true} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %x : tensor<4x8xf32>
}

// -----

// What only a loop needs that nobody reads is not there.
// CHECK-LABEL: @dead_loops
// CHECK-NEXT: return %arg0
func.func @dead_loops(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0 = stablehlo.exponential %x : tensor<4xf32>
  %1:2 = stablehlo.while(%i = %zero, %y = %0) : tensor<i32>, tensor<4xf32>
  cond {
    %three = stablehlo.constant dense<3> : tensor<i32>
    %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %s = stablehlo.constant dense<0.0> : tensor<f32>
    %r = stablehlo.reduce(%y init: %s) applies stablehlo.add across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %z = stablehlo.broadcast_in_dim %r, dims = [] : (tensor<f32>) -> tensor<4xf32>
    stablehlo.return %j, %z : tensor<i32>, tensor<4xf32>
  }
  %2 = "stablehlo.case"(%1#0) ({
    stablehlo.return %1#1 : tensor<4xf32>
  }, {
    %3 = stablehlo.negate %1#1 : tensor<4xf32>
    stablehlo.return %3 : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %x : tensor<4xf32>
}

// -----

// Something in these may have an effect.
// CHECK-LABEL: @loops_with_calls
// CHECK: stablehlo.while
// CHECK: stablehlo.custom_call @print
func.func @loops_with_calls(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %y = %x) : tensor<i32>, tensor<4xf32>
  cond {
    %three = stablehlo.constant dense<3> : tensor<i32>
    %c = stablehlo.compare LT, %i, %three : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %z = stablehlo.custom_call @print(%y) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %j, %z : tensor<i32>, tensor<4xf32>
  }
  return %x : tensor<4xf32>
}

// -----

// CHECK-LABEL: @in_a_loop
// CHECK: stablehlo.while
// CHECK: stablehlo.add %{{.*}}, %{{.*}} {alpa.follow = 0 : i64}
// CHECK-NEXT: stablehlo.return
func.func @in_a_loop(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.while(%a = %x) : tensor<4xf32>
  cond {
    %p = stablehlo.constant dense<true> : tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %1 = stablehlo.add %a, %a : tensor<4xf32>
    %2 = stablehlo.convert %1 : tensor<4xf32>
    %3 = stablehlo.reshape %2 : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %3 : tensor<4xf32>
  }
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @barriers_and_markers_stay
// CHECK-NEXT: %[[B:.*]] = stablehlo.optimization_barrier %arg0
// CHECK-NEXT: %[[L:.*]] = stablehlo.custom_call @alpa.layer_boundary(%[[B]])
// CHECK-NEXT: %[[G:.*]] = stablehlo.custom_call @alpa.gradient(%[[L]])
// CHECK-NEXT: return %[[G]]
func.func @barriers_and_markers_stay(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.optimization_barrier %x : tensor<4xf32>
  %1 = stablehlo.custom_call @alpa.layer_boundary(%0) : (tensor<4xf32>) -> tensor<4xf32>
  %2 = stablehlo.custom_call @alpa.gradient(%1) : (tensor<4xf32>) -> tensor<4xf32>
  return %2 : tensor<4xf32>
}

// -----

// A sharding that the program asks of an op outlives the op.
// CHECK-LABEL: @sharding_of_an_identity
// CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %arg0 <@mesh, [{"a"}, {}]>
// CHECK-NEXT: return %[[C]]
sdy.mesh @mesh = <["a"=2]>
func.func @sharding_of_an_identity(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %0 = stablehlo.reshape %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}, {}]>]>} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return %0 : tensor<4x8xf32>
}
