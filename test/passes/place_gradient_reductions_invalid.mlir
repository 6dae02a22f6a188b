// RUN: alpa-opt %s --verify-diagnostics --pipeline='place-gradient-reductions'

// expected-error@+1 {{no alpa.plan; run stage-mesh-partition before this pass}}
func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  return %x : tensor<2xf32>
}
