// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x4 meshes=0-1:2,2-3:2}' --split-input-file --verify-diagnostics

// expected-error @+1 {{argument 0 is held on @mesh_2, which is not among the given meshes (mesh_0, mesh_1); name them with the option meshes}}
func.func public @no_such_mesh(%x: tensor<4xf32>) -> tensor<4xf32>
    attributes {alpa.held = [{input = 0 : i64, shardings = [#sdy.sharding<@mesh_2, [{}]>]}]} {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 of type tensor<4xf32> cannot be held as #sdy.sharding<@mesh_0, [{"x"}]>; a dimension for each of its own, over axis0, is expected}}
func.func public @no_such_axis(%x: tensor<4xf32>) -> tensor<4xf32>
    attributes {alpa.held = [{input = 0 : i64, shardings = [#sdy.sharding<@mesh_0, [{"x"}]>]}]} {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{there is no shardings of alpa.held; expected a list}}
func.func public @no_shardings(%x: tensor<4xf32>) -> tensor<4xf32>
    attributes {alpa.held = [{input = 0 : i64}]} {
  return %x : tensor<4xf32>
}
