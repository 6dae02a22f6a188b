// RUN: alpa-opt %s --split-input-file --pipeline='insert-cross-mesh-reshard' --verify-diagnostics

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  func.func public @no_shardings(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // expected-error @+1 {{a transfer between tensors without shardings; run ilp-shard-annotate before}}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

module {
  // expected-error @+1 {{no alpa.plan; run stage-mesh-partition before this pass}}
  func.func public @no_plan(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"axis0":(1)2}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  func.func public @part_of_an_axis(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // expected-error @+1 {{a sharding over a part of axis axis0 on @mesh_0, which has the axes axis0 to be used whole}}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}], unreduced={"axis0"}>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  func.func public @unreduced(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // expected-error @+1 {{an unreduced value cannot cross: sum it in the fragment that makes it}}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  // expected-error @+1 {{mesh_0 has logical_shape (7,) in alpa.meshes and axes of sizes (2,) in the topology}}
  func.func public @another_shape(%x: !x0) -> !x0 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 7>}],
      alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    return %x : !x0
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  // expected-error @+1 {{mesh_0 of 1x2 devices does not fit into the cluster cpu:1x1}}
  func.func public @a_smaller_cluster(%x: !x0) -> !x0 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x1", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    return %x : !x0
  }
}
