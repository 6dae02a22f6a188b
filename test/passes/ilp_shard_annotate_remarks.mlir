// RUN: alpa-opt %s --split-input-file --pipeline='ilp-shard-annotate' --verify-diagnostics

!x = !mpmd.mesh_tensor<"mesh_0", tensor<64x16xf32>>
!b = !mpmd.mesh_tensor<"mesh_0", tensor<16xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  func.func public @an_op_without_a_rule_runs_whole(%x: !x, %b: !b) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %b) {alpa.part = "forward"} (%a: tensor<64x16xf32>, %c: tensor<16xf32>) {
      // expected-remark @+1 {{chlo.broadcast_add has no sharding rule: each of 4 devices runs it whole, about 0.826 us per step instead of 0.206, on 8.06 KiB of operands and results}}
      %1 = chlo.broadcast_add %a, %c : (tensor<64x16xf32>, tensor<16xf32>) -> tensor<64x16xf32>
      mpmd.return %1 : tensor<64x16xf32>
    } : (!x, !b) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<64x16xf32>>
!b = !mpmd.mesh_tensor<"mesh_0", tensor<16xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  func.func public @a_custom_call_without_a_rule_runs_whole(%x: !x, %b: !b) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %b) {alpa.part = "forward"} (%a: tensor<64x16xf32>, %c: tensor<16xf32>) {
      // expected-remark @+1 {{the custom call @my.kernel has no sharding rule: each of 4 devices runs it whole, about 0.826 us per step instead of 0.206, on 8.06 KiB of operands and results; alpa.passes.register_sharding_rule or an sdy.sharding_rule attribute would let it be split}}
      %1 = stablehlo.custom_call @my.kernel(%a, %c) : (tensor<64x16xf32>, tensor<16xf32>) -> tensor<64x16xf32>
      mpmd.return %1 : tensor<64x16xf32>
    } : (!x, !b) -> !x
    return %0 : !x
  }
}
