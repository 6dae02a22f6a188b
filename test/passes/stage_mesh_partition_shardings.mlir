// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x2 num-stages=1}' --verify-diagnostics | filecheck %s

// The program's own shardings go, with one remark: they name a mesh that the plan does not have.
// CHECK-NOT: @mine
// CHECK: sdy.mesh @mesh_0 = <["axis0"=2]>
// CHECK-NOT: @mine
// CHECK: mpmd.fragment<mesh="mesh_0"
// CHECK-NEXT: %[[Y:.*]] = stablehlo.tanh
// CHECK-NEXT: mpmd.return %[[Y]]
sdy.mesh @mine = <["a"=2]>
// expected-remark @+1 {{the program's own shardings (2 on arguments and results, 1 constraints) are searched anew: planning within given shardings is not built yet}}
func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mine, [{"a"}]>})
    -> (tensor<4xf32> {sdy.sharding = #sdy.sharding<@mine, [{}]>}) {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
    %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mine, [{"a"}]>]>} : tensor<4xf32>
    %2 = sdy.sharding_constraint %1 <@mine, [{"a"}]> : tensor<4xf32>
    mpmd.return %2 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
