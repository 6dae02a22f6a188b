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
      // expected-remark @+1 {{chlo.broadcast_add has no sharding rule: each of 4 devices runs it whole, about 0.826 us per step instead of 0.206 us, on 8.06 KiB of operands and results}}
      %1 = chlo.broadcast_add %a, %c : (tensor<64x16xf32>, tensor<16xf32>) -> tensor<64x16xf32>
      mpmd.return %1 : tensor<64x16xf32>
    } : (!x, !b) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<1048576x1024xf32>>
!b = !mpmd.mesh_tensor<"mesh_0", tensor<16xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  func.func public @a_custom_call_without_a_rule_runs_whole(%x: !x, %b: !b) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %b) {alpa.part = "forward"} (%a: tensor<1048576x1024xf32>, %c: tensor<16xf32>) {
      // expected-remark @+1 {{the custom call @my.kernel has no sharding rule: each of 4 devices runs it whole, about 859 ms per step instead of 215 ms, on 8 GiB of operands and results; alpa.passes.register_sharding_rule or an sdy.sharding_rule attribute would let it be split}}
      %1 = stablehlo.custom_call @my.kernel(%a, %c) : (tensor<1048576x1024xf32>, tensor<16xf32>) -> tensor<1048576x1024xf32>
      mpmd.return %1 : tensor<1048576x1024xf32>
    } : (!x, !b) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  func.func public @a_gradient_without_a_place_for_its_reduction(%w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 4 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) {alpa.part = "backward"} (%a: tensor<8x4xf32>) {
      %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      mpmd.return %2 : tensor<4x4xf32>
    } : (!x) -> !w
    // expected-remark @+1 {{gradients that each reader reduces by itself: 1; run place-gradient-reductions before this pass to reduce each of them once}}
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xf32>, %b: tensor<4x4xf32>) {
      %2 = stablehlo.add %a, %b : tensor<4x4xf32>
      mpmd.return %2 : tensor<4x4xf32>
    } : (!w, !w) -> !w
    return %1 : !w
  }
}
