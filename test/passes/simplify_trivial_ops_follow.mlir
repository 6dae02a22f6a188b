// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file | filecheck %s

// CHECK-LABEL: @element_wise
// CHECK-NEXT: stablehlo.tanh %arg0 {alpa.follow = 0 : i64}
// CHECK-NEXT: chlo.erf %{{.*}} {alpa.follow = 0 : i64}
func.func @element_wise(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  %1 = chlo.erf %0 : tensor<4xf32> -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

// Depth counts the heavy ops on the way, however long the other way is.
// CHECK-LABEL: @deepest
// CHECK: stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : (tensor<4x4xf32>
// CHECK: stablehlo.add %{{.*}}, %{{.*}} {alpa.follow = 1 : i64}
func.func @deepest(%x: tensor<4x4xf32>, %w: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = stablehlo.tanh %x : tensor<4x4xf32>
  %2 = stablehlo.sine %1 : tensor<4x4xf32>
  %3 = stablehlo.cosine %2 : tensor<4x4xf32>
  %4 = stablehlo.add %3, %0 : tensor<4x4xf32>
  return %4 : tensor<4x4xf32>
}

// -----

// CHECK-LABEL: @longest_of_equal_depth
// CHECK: stablehlo.subtract %{{.*}} {alpa.follow = 1 : i64}
func.func @longest_of_equal_depth(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %y : tensor<4xf32>
  %1 = stablehlo.subtract %x, %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @largest_then_lowest
// CHECK: stablehlo.select %{{.*}} {alpa.follow = 1 : i64}
func.func @largest_then_lowest(%p: tensor<4xi1>, %x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.select %p, %x, %y : tensor<4xi1>, tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// What is computed from constants or from a scalar has no layout to give, and needs no mark.
// CHECK-LABEL: @free_operands
// CHECK-NEXT: stablehlo.iota dim = 0 : tensor<4xf32>
// CHECK-NEXT: stablehlo.exponential %{{[0-9]+}} : tensor<4xf32>
// CHECK-NEXT: stablehlo.broadcast_in_dim %arg1, dims = [] : (tensor<f32>) -> tensor<4xf32>
// CHECK-NEXT: stablehlo.multiply %{{[0-9]+}}, %{{[0-9]+}} : tensor<4xf32>
// CHECK-NEXT: stablehlo.add %{{[0-9]+}}, %arg0 {alpa.follow = 1 : i64}
func.func @free_operands(%x: tensor<4xf32>, %s: tensor<f32>) -> tensor<4xf32> {
  %0 = stablehlo.iota dim = 0 : tensor<4xf32>
  %1 = stablehlo.exponential %0 : tensor<4xf32>
  %2 = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> tensor<4xf32>
  %3 = stablehlo.multiply %1, %2 : tensor<4xf32>
  %4 = stablehlo.add %3, %x : tensor<4xf32>
  return %4 : tensor<4xf32>
}

// -----

// A scalar operand beside tensors is not followed; among scalars the rules are the same.
// CHECK-LABEL: @scalars
// CHECK: stablehlo.add %arg2, %{{.*}} {alpa.follow = 0 : i64} : tensor<f32>
// CHECK: stablehlo.select %{{.*}} {alpa.follow = 2 : i64}
// CHECK: stablehlo.clamp %{{.*}} {alpa.follow = 1 : i64}
func.func @scalars(%x: tensor<4xf32>, %p: tensor<i1>, %s: tensor<f32>) -> tensor<4xf32> {
  %c = stablehlo.constant dense<1.0> : tensor<f32>
  %0 = stablehlo.add %s, %c : tensor<f32>
  %1 = stablehlo.tanh %x : tensor<4xf32>
  %2 = stablehlo.select %p, %x, %1 : tensor<i1>, tensor<4xf32>
  %3 = stablehlo.clamp %c, %x, %0 : (tensor<f32>, tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %4 = stablehlo.multiply %2, %3 : tensor<4xf32>
  return %4 : tensor<4xf32>
}

// -----

// x - mean(x): the broadcast mean lies further from the argument, but says nothing of dimension 1.
// CHECK-LABEL: @broadcast_last
// CHECK: stablehlo.reduce(%arg0 init: %{{.*}}) applies stablehlo.add across dimensions = [1] {alpa.follow = 0 : i64}
// CHECK: stablehlo.broadcast_in_dim %{{.*}}, dims = [0] {alpa.follow = 0 : i64}
// CHECK: stablehlo.subtract %arg0, %{{.*}} {alpa.follow = 0 : i64}
func.func @broadcast_last(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %c = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %c) applies stablehlo.add across dimensions = [1] : (tensor<4x8xf32>, tensor<f32>) -> tensor<4xf32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [0] : (tensor<4xf32>) -> tensor<4x8xf32>
  %2 = stablehlo.subtract %x, %1 : tensor<4x8xf32>
  return %2 : tensor<4x8xf32>
}

// -----

// Data movement and scalar functions are not marked.
// CHECK-LABEL: @unmarked
// CHECK-NOT: alpa.follow
func.func @unmarked(%x: tensor<4xf32>) -> (tensor<2xf32>, tensor<4xf32>, tensor<8xf32>, tensor<4xf32>) {
  %0 = stablehlo.slice %x [0:2] : (tensor<4xf32>) -> tensor<2xf32>
  %1 = stablehlo.reverse %x, dims = [0] : tensor<4xf32>
  %2 = stablehlo.concatenate %x, %x, dim = 0 : (tensor<4xf32>, tensor<4xf32>) -> tensor<8xf32>
  %3 = "stablehlo.sort"(%x) ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %4 = stablehlo.negate %a : tensor<f32>
    %5 = stablehlo.compare LT, %4, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %5 : tensor<i1>
  }) {dimension = 0 : i64} : (tensor<4xf32>) -> tensor<4xf32>
  return %0, %1, %2, %3 : tensor<2xf32>, tensor<4xf32>, tensor<8xf32>, tensor<4xf32>
}

// -----

// In a loop depth starts anew at its variables: %x is no deeper than %y; %w comes from outside.
// CHECK-LABEL: @in_a_loop
// CHECK: stablehlo.dot_general
// CHECK: stablehlo.while
// CHECK: stablehlo.add %{{.*}} {alpa.follow = 0 : i64}
// CHECK: stablehlo.multiply %{{.*}} {alpa.follow = 1 : i64}
func.func @in_a_loop(%a: tensor<4x4xf32>, %p: tensor<i1>) -> tensor<4x4xf32> {
  %w = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %0:2 = stablehlo.while(%y = %a, %x = %w) : tensor<4x4xf32>, tensor<4x4xf32>
  cond {
    stablehlo.return %p : tensor<i1>
  } do {
    %1 = stablehlo.add %y, %x : tensor<4x4xf32>
    %2 = stablehlo.multiply %1, %w : tensor<4x4xf32>
    stablehlo.return %2, %x : tensor<4x4xf32>, tensor<4x4xf32>
  }
  return %0#0 : tensor<4x4xf32>
}

// -----

// Barriers and markers hand each operand's depth to the result of its number.
// CHECK-LABEL: @through_a_marker
// CHECK: stablehlo.custom_call @alpa.layer_boundary
// CHECK: stablehlo.add %{{.*}} {alpa.follow = 1 : i64}
func.func @through_a_marker(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %1:2 = stablehlo.custom_call @alpa.layer_boundary(%x, %0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>)
  %2 = stablehlo.add %1#0, %1#1 : tensor<4x4xf32>
  return %2 : tensor<4x4xf32>
}

// -----

// Marks that do not belong are removed.
// CHECK-LABEL: @stale_marks
// CHECK-NEXT: stablehlo.iota dim = 0 : tensor<4xf32>
// CHECK-NEXT: stablehlo.add %arg0, %{{.*}} {alpa.follow = 0 : i64}
func.func @stale_marks(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.iota dim = 0 {alpa.follow = 0 : i64} : tensor<4xf32>
  %1 = stablehlo.add %x, %0 {alpa.follow = 1 : i64} : tensor<4xf32>
  return %1 : tensor<4xf32>
}
