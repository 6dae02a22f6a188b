// RUN: alpa-opt %s --pipeline='import-hlo' --split-input-file --verify-diagnostics

func.func public @one_elided_constant(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-remark @+1 {{1 constant is elided, from here on: 16 B of values were left out when the program was printed. It is planned by their types, and cannot be run; print it with all values, or make them arguments}}
  %c = stablehlo.constant dense_resource<__elided__> : tensor<4xf32>
  %0 = stablehlo.add %x, %c : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func private @inner(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-remark @+1 {{2 constants are elided, from here on: 32 B}}
  %c = sdy.constant dense_resource<__elided__> : tensor<4xf32>
  %0 = stablehlo.add %x, %c : tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func public @the_first_of_several(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @inner(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %splat = stablehlo.constant dense<1.0> : tensor<4xf32>
  %complex = stablehlo.constant dense<(0.0, 1.0)> : tensor<2xcomplex<f32>>
  %c = stablehlo.constant dense_resource<__elided__> : tensor<4xf32>
  %1 = stablehlo.add %0, %c : tensor<4xf32>
  %2 = stablehlo.add %1, %splat : tensor<4xf32>
  return %2 : tensor<4xf32>
}
