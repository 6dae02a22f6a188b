// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x4 meshes=0-1:2,2-3:2}' --split-input-file --verify-diagnostics

// expected-error @+1 {{argument 0 is held on @mesh_2, which is none of the given meshes (mesh_0, mesh_1); name them with the option meshes}}
func.func public @no_such_mesh(%x: tensor<4xf32> {alpa.held = [#sdy.sharding<@mesh_2, [{}]>]}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 of type tensor<4xf32> cannot be held as #sdy.sharding<@mesh_0, [{"x"}]>; a dimension for each of its own, over axis0, is expected}}
func.func public @no_such_axis(%x: tensor<4xf32> {alpa.held = [#sdy.sharding<@mesh_0, [{"x"}]>]}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
