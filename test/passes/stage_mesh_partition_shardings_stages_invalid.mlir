// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x4 num-stages=2}' --verify-diagnostics

// The meshes of all stages are the cluster.
module {
  // expected-error @+1 {{the program's shardings are over @m, which has 4 device(s), for each of 2 stages, and the cluster has 4; plan for a cluster of 8, set num-stages=1, make @m the 2 device(s) of one stage, or remove the shardings}}
  sdy.mesh @m = <["a"=4]>
  func.func public @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x8xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<4x8xf32>
      mpmd.return %1 : tensor<4x8xf32>
    } : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %2 = mpmd.named_computation<"layer_1"> (%0) (%a: tensor<4x8xf32>) {
      %1 = stablehlo.tanh %a : tensor<4x8xf32>
      mpmd.return %1 : tensor<4x8xf32>
    } : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %2 : tensor<4x8xf32>
  }
}

// -----

module {
  // expected-error @+1 {{the program's shardings are over @m, which has 3 device(s), for each of 2 stages, and the cluster has 4; plan for a cluster of 6, make @m the 2 device(s) of one stage, or remove the shardings}}
  sdy.mesh @m = <["a"=3]>
  func.func public @main(%x: tensor<6x8xf32>) -> tensor<6x8xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<6x8xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<6x8xf32>
      mpmd.return %1 : tensor<6x8xf32>
    } : (tensor<6x8xf32>) -> tensor<6x8xf32>
    return %0 : tensor<6x8xf32>
  }
}

// -----

// There are as many layers as stages, at least.
module {
  sdy.mesh @m = <["a"=2]>
  // expected-error @+1 {{cannot make 2 stages of 1 layer(s) on 4 device(s); num-stages can be at most 1}}
  func.func public @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4x8xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<4x8xf32>
      mpmd.return %1 : tensor<4x8xf32>
    } : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %0 : tensor<4x8xf32>
  }
}
