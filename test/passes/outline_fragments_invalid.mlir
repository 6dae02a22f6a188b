// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='outline-fragments'

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  sdy.mesh @mesh_1 = <["a"=2]>
  func.func public @another_mesh(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>, <"mesh_1" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      // expected-error @+1 {{a sharding over @mesh_1 in a fragment on mesh_0}}
      %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{"a"}]>]>} : tensor<8xf32>
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

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @no_part(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    // expected-error @+1 {{the fragment needs alpa.part = "forward", "backward" or "update"}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @update_before_forward(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%x) {alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    // expected-error @+1 {{operand 0 of this forward fragment is made by the update part}}
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %1 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xi32>>
module {
  func.func public @integer_gradient(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // expected-error @+1 {{result 0 of type i32 flows from a backward into an update fragment and would be added up over 4 micro-batches}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8xi32>) {
      mpmd.return %a : tensor<8xi32>
    } : (!x) -> !x
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%0) {alpa.part = "update"} (%a: tensor<8xi32>) {
      mpmd.return %a : tensor<8xi32>
    } : (!x) -> !x
    return %1 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  // expected-error @+1 {{result 0 has 4 versions, one per micro-batch, and no alpa.result}}
  func.func public @no_result_role(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  // expected-error @+1 {{argument 0 is a batch of 2 micro-batches and needs alpa.batch_dim below its rank of 1; it has 3}}
  func.func public @no_such_batch_dim(%x: !x {alpa.role = "batch", alpa.batch_dim = 3 : i64}) -> (!x {alpa.result = "concat:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 2 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    return %x : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  // expected-error @+1 {{result 0 is the new state of argument 0 and comes from a backward fragment; with 2 micro-batches}}
  func.func public @state_from_backward(%x: !x) -> (!x {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 2 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module attributes {alpa.micro_batches = "exact"} {
  // expected-error @+1 {{result 0 is the new state of argument 0 and comes from a forward fragment, which would change it in each of the 2 micro-batches}}
  func.func public @exact_state_from_forward(%x: !x) -> (!x {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 2 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @elided_constant(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      // expected-error @+1 {{this constant is elided: its values were left out when the program was printed, so no module can be compiled; print the program with all values, or make the constant an argument}}
      %c = stablehlo.constant dense_resource<__elided__> : tensor<8xf32>
      %b = stablehlo.add %a, %c : tensor<8xf32>
      mpmd.return %b : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}
