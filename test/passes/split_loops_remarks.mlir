// RUN: alpa-opt %s --split-input-file --pipeline='split-loops{num-layers=2}' --verify-diagnostics

!w = tensor<2x8x8xf32>
!x = tensor<4x8xf32>
func.func public @the_bound_is_data(%w: !w, %x: !x, %n: tensor<i32>) -> !x {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  // expected-remark @+1 {{this loop stays whole, in one layer: its trip count is not a constant that can be read off}}
  %r:2 = stablehlo.while(%i = %zero, %h = %x) : tensor<i32>, !x
  cond {
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.dynamic_slice %w, %i, %zero, %zero, sizes = [1, 8, 8] : (!w, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x8x8xf32>) -> tensor<8x8xf32>
    %2 = stablehlo.dot_general %h, %1, contracting_dims = [1] x [0] : (!x, tensor<8x8xf32>) -> !x
    %3 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %3, %2 : tensor<i32>, !x
  }
  return %r#1 : !x
}

// -----

// A recurrence over time: the batch is stacked, and all steps share the weights.
!w = tensor<8x8xf32>
!x = tensor<2x4x8xf32>
!h = tensor<4x8xf32>
func.func public @no_state_is_stacked(%w: !w, %x: !x {alpa.role = "batch", alpa.batch_dim = 1 : i64}, %h0: !h) -> !h {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  // expected-remark @+1 {{this loop stays whole, in one layer: no state is stacked in it; what its trips share would be on every stage}}
  %r:3 = stablehlo.while(%i = %zero, %h = %h0, %p = %x) : tensor<i32>, !h, !x
  cond {
    %n = stablehlo.constant dense<2> : tensor<i32>
    %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %0 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %0 = stablehlo.dynamic_slice %p, %i, %zero, %zero, sizes = [1, 4, 8] : (!x, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x8xf32>
    %1 = stablehlo.reshape %0 : (tensor<1x4x8xf32>) -> !h
    %2 = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0] : (!h, !w) -> !h
    %3 = stablehlo.add %1, %2 : !h
    %4 = stablehlo.add %i, %one : tensor<i32>
    stablehlo.return %4, %3, %p : tensor<i32>, !h, !x
  }
  return %r#1 : !h
}
