// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='export-stages'

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @unreduced(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      // expected-error @+1 {{stablehlo.tanh cannot leave its result unreduced over a; plan this value as a replica or as a shard}}
      %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}], unreduced={"a"}>]>} : tensor<8xf32>
      mpmd.return %1 : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @exported_already(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    // expected-error @+1 {{the fragment is exported already, as @mesh_0.layer_0.forward}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward", alpa.module = @mesh_0.layer_0.forward} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

// expected-error @+1 {{empty module: it holds no function to plan}}
module {
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
// expected-error @+1 {{there is no schedule of alpa.plan; expected a string}}
func.func public @plan_without_a_schedule(%x: !x) -> !x attributes {
    topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
    alpa.plan = {num_micro_batches = 1 : i64, predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
  return %x : !x
}

// -----

// expected-error @+1 {{the function has no mpmd.topology: it is not planned yet; run alpa{cluster=...} first}}
func.func public @not_planned(%x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}
