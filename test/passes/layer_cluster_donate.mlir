// RUN: alpa-opt %s --pipeline='layer-cluster{num-layers=1 donate-states=true}' --split-input-file | filecheck %s

// CHECK-LABEL: func.func public @states_are_donated
// CHECK-SAME: %{{[^:]*}}: tensor<8x8xf32> {alpa.input = 0 : i64, alpa.role = "state", jax.buffer_donor = true}
// CHECK-SAME: %{{[^:]*}}: tensor<4x8xf32> {alpa.batch_dim = 0 : i64, alpa.input = 1 : i64, alpa.role = "batch"}
func.func public @states_are_donated(%w: tensor<8x8xf32>, %x: tensor<4x8xf32>) -> (tensor<8x8xf32>, tensor<4x8xf32>) {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0] : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
  %new = stablehlo.subtract %w, %0 : tensor<8x8xf32>
  return %new, %y : tensor<8x8xf32>, tensor<4x8xf32>
}

// -----

// What is donated already says for which result.
// CHECK-LABEL: func.func public @already_donated
// CHECK-SAME: tensor<8xf32> {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 0 : i32}
func.func public @already_donated(%w: tensor<8xf32> {tf.aliasing_output = 0 : i32}) -> tensor<8xf32> {
  %new = stablehlo.add %w, %w : tensor<8xf32>
  return %new : tensor<8xf32>
}
