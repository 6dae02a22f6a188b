// RUN: alpa-opt %s --split-input-file --pipeline='outline-fragments,accumulate-gradients' --verify-diagnostics

// A plan that was not made by stage-mesh-partition adds up in bf16, and does not say that it means to.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xbf16>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xbf16>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  func.func public @a_narrow_total(%w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    // expected-remark @+1 {{result 0 is added up in bf16 over 4 micro-batches; to add up in f32, plan the program anew by stage-mesh-partition}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8x4xbf16>) {
      %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xbf16>, tensor<8x4xbf16>) -> tensor<4x4xbf16>
      mpmd.return %2 : tensor<4x4xbf16>
    } : (!x) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xbf16>, %b: tensor<4x4xbf16>) {
      %3 = stablehlo.subtract %a, %b : tensor<4x4xbf16>
      mpmd.return %3 : tensor<4x4xbf16>
    } : (!w, !w) -> !w
    return %1 : !w
  }
}

// -----

// With accumulate_dtype = "same" there is nothing to say.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xbf16>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xbf16>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  func.func public @meant_to_be_narrow(%w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {accumulate_dtype = "same", num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8x4xbf16>) {
      %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xbf16>, tensor<8x4xbf16>) -> tensor<4x4xbf16>
      mpmd.return %2 : tensor<4x4xbf16>
    } : (!x) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xbf16>, %b: tensor<4x4xbf16>) {
      %3 = stablehlo.subtract %a, %b : tensor<4x4xbf16>
      mpmd.return %3 : tensor<4x4xbf16>
    } : (!w, !w) -> !w
    return %1 : !w
  }
}
