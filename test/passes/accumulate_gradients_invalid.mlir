// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='accumulate-gradients'

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @accumulated_already(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!x {alpa.result = "last"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // expected-error @+1 {{the fragment accumulates already; run accumulate-gradients once only}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @m, alpa.accumulators = array<i64: 0>, alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%0) {alpa.module = @m, alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %1 : !x
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %x : tensor<8xf32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!g = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}], unreduced={"a"}>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @partial_sum(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!x {alpa.result = "last"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // expected-error @+1 {{result 0 is a partial sum; run lower-partial-sums before this pass}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @b, alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !g
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%0) {alpa.module = @b, alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!g) -> !x
    return %1 : !x
  }
  module @b {
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}], unreduced={"a"}>}) {
      return %x : tensor<8xf32>
    }
  }
}
