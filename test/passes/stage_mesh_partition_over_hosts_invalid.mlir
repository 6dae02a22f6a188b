// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:3x2 meshes-over-hosts=false}' --split-input-file --verify-diagnostics

// expected-error @+1 {{meshes-over-hosts=false keeps each mesh inside one host, so 3 hosts need at least 3 stages, and the program has 1 layer(s); cut it into more (num-layers, alpa.mark_layer_boundary), or plan for a cluster of at most 1 host(s)}}
func.func public @fewer_layers_than_hosts(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
    %1 = stablehlo.tanh %a : tensor<4xf32>
    mpmd.return %1 : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

module {
  sdy.mesh @mesh = <["x"=6]>
  // expected-error @+1 {{meshes-over-hosts=false keeps each mesh inside one host, and the given mesh @mesh spans 3 hosts; plan for a cluster of one host, or give other meshes}}
  func.func public @mesh_of_the_program(%x: tensor<12xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<12xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<12xf32>) {
      %1 = stablehlo.tanh %a : tensor<12xf32>
      mpmd.return %1 : tensor<12xf32>
    } : (tensor<12xf32>) -> tensor<12xf32>
    return %0 : tensor<12xf32>
  }
}
