// RUN: alpa-opt %s --pipeline='layer-cluster{clustering=manual}' --verify-diagnostics

// expected-error @+1 {{clustering=manual cuts at the @alpa.layer_boundary markers, and this program has none}}
func.func public @no_markers(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
