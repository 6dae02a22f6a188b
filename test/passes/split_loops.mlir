// RUN: alpa-opt %s --pipeline='split-loops{num-layers=2}' --split-input-file | filecheck %s

// A part of one trip is straight code; each part of the weights is an argument.
// CHECK-LABEL: func.func public @two_trips
// CHECK-SAME: (%[[W0:.*]]: tensor<1x8x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 0, 1>}, %[[W1:.*]]: tensor<1x8x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 1, 2>}, %[[X:.*]]: tensor<4x8xf32> {alpa.input = 1 : i64})
// CHECK-NEXT: %[[A:.*]] = stablehlo.reshape %[[W0]] {alpa.follow = 0 : i64} : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
// CHECK-NEXT: %[[H:.*]] = stablehlo.dot_general %[[X]], %[[A]]
// CHECK-NEXT: %[[B:.*]] = stablehlo.reshape %[[W1]]
// CHECK-NEXT: %[[Y:.*]] = stablehlo.dot_general %[[H]], %[[B]]
// CHECK-NEXT: return %[[Y]]
func.func public @two_trips(%w: tensor<2x8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %h = %x, %p = %w) : tensor<i32>, tensor<4x8xf32>, tensor<2x8x8xf32>
  cond {
    %n = stablehlo.constant dense<2> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.dynamic_slice %p, %i, %zero, %zero, sizes = [1, 8, 8] : (tensor<2x8x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %2 = stablehlo.dot_general %h, %1, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
    %3 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %3, %2, %p : tensor<i32>, tensor<4x8xf32>, tensor<2x8x8xf32>
  }
  return %r#1 : tensor<4x8xf32>
}

// -----

// A part of several trips stays a loop, which counts from 0: equal parts are equal ops. Where the
// body uses the counter for more than its rows, the number of the first trip is added.
// CHECK-LABEL: func.func public @several_trips
// CHECK-SAME: %[[W0:.*]]: tensor<2x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 0, 2>}, %[[W1:.*]]: tensor<2x8xf32> {alpa.input = 0 : i64, alpa.slice = array<i64: 0, 2, 4>}
// CHECK: %[[FIRST:.*]]:3 = stablehlo.while(%{{.*}} = %c{{.*}}, %{{.*}} = %arg2, %{{.*}} = %[[W0]])
// CHECK: stablehlo.constant dense<2> : tensor<i32>
// CHECK-NEXT: stablehlo.compare LT
// CHECK: do {
// CHECK-NOT: stablehlo.constant dense<2>
// CHECK: }
// CHECK: stablehlo.while(%[[I:.*]] = %c{{.*}}, %[[H:.*]] = %[[FIRST]]#1, %[[P:.*]] = %[[W1]])
// CHECK: do {
// CHECK: %[[TWO:.*]] = stablehlo.constant dense<2> : tensor<i32>
// CHECK-NEXT: %[[TRIP:.*]] = stablehlo.add %[[I]], %[[TWO]]
// CHECK: stablehlo.dynamic_slice %[[P]], %[[I]], {{.*}} sizes = [1, 8] : (tensor<2x8xf32>
// CHECK: stablehlo.convert %[[TRIP]]
func.func public @several_trips(%w: tensor<4x8xf32>, %x: tensor<8xf32>) -> tensor<8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %h = %x, %p = %w) : tensor<i32>, tensor<8xf32>, tensor<4x8xf32>
  cond {
    %n = stablehlo.constant dense<4> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.dynamic_slice %p, %i, %zero, sizes = [1, 8] : (tensor<4x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8xf32>) -> tensor<8xf32>
    %2 = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
    %3 = stablehlo.broadcast_in_dim %2, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %4 = stablehlo.multiply %1, %3 : tensor<8xf32>
    %5 = stablehlo.add %h, %4 : tensor<8xf32>
    %6 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %6, %5, %p : tensor<i32>, tensor<8xf32>, tensor<4x8xf32>
  }
  return %r#1 : tensor<8xf32>
}

// -----

// The trips run through the rows from the last one on, and the stack is dimension 1 of the state:
// the last part comes first. A norm over all rows is one of each part first.
// CHECK-LABEL: func.func public @backwards
// CHECK-SAME: (%[[W0:.*]]: tensor<8x1xf32> {alpa.input = 0 : i64, alpa.role = "state", alpa.slice = array<i64: 1, 0, 1>, tf.aliasing_output = 0 : i32}, %[[W1:.*]]: tensor<8x1xf32> {alpa.input = 0 : i64, alpa.role = "state", alpa.slice = array<i64: 1, 1, 2>, tf.aliasing_output = 1 : i32}, %[[X:.*]]: tensor<8xf32> {{{.*}}alpa.input = 1 : i64
// CHECK-SAME: -> (tensor<8x1xf32> {alpa.output = 0 : i64, alpa.result = "state:0", alpa.slice = array<i64: 1, 0, 1>}, tensor<8x1xf32> {alpa.output = 0 : i64, alpa.result = "state:0", alpa.slice = array<i64: 1, 1, 2>}, tensor<f32> {alpa.output = 1 : i64
// CHECK-DAG: %[[T1:.*]] = stablehlo.transpose %[[W1]]
// CHECK-DAG: %[[R1:.*]] = stablehlo.reshape %[[T1]]
// CHECK: %[[H:.*]] = stablehlo.multiply %[[X]], %[[R1]]
// CHECK: stablehlo.multiply %[[H]]
// CHECK: %[[N0:.*]] = stablehlo.reduce(%{{.*}} init: {{.*}}) applies stablehlo.add across dimensions = [0, 1] {{.*}} : (tensor<8x1xf32>
// CHECK: %[[N1:.*]] = stablehlo.reduce(%{{.*}} init: {{.*}}) applies stablehlo.add across dimensions = [0, 1] {{.*}} : (tensor<8x1xf32>
// CHECK: %[[NORM:.*]] = stablehlo.add %[[N0]], %[[N1]]
// CHECK-NOT: concatenate
// CHECK: return %{{.*}}, %{{.*}}, %[[NORM]] : tensor<8x1xf32>, tensor<8x1xf32>, tensor<f32>
func.func public @backwards(%w: tensor<8x2xf32> {tf.aliasing_output = 0 : i32}, %x: tensor<8xf32>) -> (tensor<8x2xf32>, tensor<f32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %f = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<2x8xf32>
  %t = stablehlo.transpose %w, dims = [1, 0] : (tensor<8x2xf32>) -> tensor<2x8xf32>
  %r:4 = stablehlo.while(%i = %zero, %h = %x, %p = %t, %g = %zeros) : tensor<i32>, tensor<8xf32>, tensor<2x8xf32>, tensor<2x8xf32>
  cond {
    %n = stablehlo.constant dense<2> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %two = stablehlo.constant dense<2> : tensor<i32>
    %0 = stablehlo.subtract %two, %i : tensor<i32>
    %1 = stablehlo.subtract %0, %one : tensor<i32>
    %2 = stablehlo.compare LT, %1, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %3 = stablehlo.add %1, %two : tensor<i32>
    %row = stablehlo.select %2, %3, %1 : tensor<i1>, tensor<i32>
    %4 = stablehlo.dynamic_slice %p, %row, %zero, sizes = [1, 8] : (tensor<2x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x8xf32>
    %5 = stablehlo.reshape %4 : (tensor<1x8xf32>) -> tensor<8xf32>
    %6 = stablehlo.multiply %h, %5 : tensor<8xf32>
    %7 = stablehlo.reshape %6 : (tensor<8xf32>) -> tensor<1x8xf32>
    %8 = stablehlo.dynamic_update_slice %g, %7, %row, %zero : (tensor<2x8xf32>, tensor<1x8xf32>, tensor<i32>, tensor<i32>) -> tensor<2x8xf32>
    %9 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %9, %6, %p, %8 : tensor<i32>, tensor<8xf32>, tensor<2x8xf32>, tensor<2x8xf32>
  }
  %b = stablehlo.transpose %r#3, dims = [1, 0] : (tensor<2x8xf32>) -> tensor<8x2xf32>
  %new = stablehlo.subtract %w, %b : tensor<8x2xf32>
  %square = stablehlo.multiply %new, %new : tensor<8x2xf32>
  %norm = stablehlo.reduce(%square init: %f) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x2xf32>, tensor<f32>) -> tensor<f32>
  return %new, %norm : tensor<8x2xf32>, tensor<f32>
}
