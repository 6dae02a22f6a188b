// RUN: alpa-opt %s --split-input-file --pipeline='ilp-shard-annotate' --verify-diagnostics

!x = !mpmd.mesh_tensor<"mesh_0", tensor<64x16xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  func.func public @unknown_custom_call_with_side_effects(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<64x16xf32>) {
      // expected-error @+1 {{the custom call @my.kernel has side effects and no sharding rule: each device would run it; alpa.passes.register_sharding_rule or an sdy.sharding_rule attribute would let it be split}}
      %1 = stablehlo.custom_call @my.kernel(%a) {has_side_effect = true} : (tensor<64x16xf32>) -> tensor<64x16xf32>
      mpmd.return %1 : tensor<64x16xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  func.func public @side_effects_of_a_scalar(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<f32>) {
      // expected-error @+1 {{the custom call @count has side effects and no sharding rule}}
      stablehlo.custom_call @count(%a) {has_side_effect = true} : (tensor<f32>) -> ()
      mpmd.return %a : tensor<f32>
    } : (!x) -> !x
    return %0 : !x
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

!x = !mpmd.mesh_tensor<"mesh_0", tensor<64xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // expected-error @+1 {{unknown cluster 'pcu': did you mean cpu?}}
  func.func public @unknown_cluster(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "pcu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    return %x : !x
  }
}

// -----

// A plan that lacks a field.
// expected-error @+1 {{there is no schedule of alpa.plan; expected a string}}
func.func public @half_a_plan() attributes {alpa.plan = {num_micro_batches = 1 : i64}} {
  return
}
