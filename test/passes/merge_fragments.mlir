// RUN: alpa-opt %s --split-input-file --pipeline='merge-fragments' | filecheck %s

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @one_micro_batch
  func.func public @one_micro_batch(%w: !w {alpa.role = "state"}, %m: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !w {alpa.result = "concat:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0", "layer_0"(1), "update_0"]> (%arg0, %arg2, %arg1) {alpa.compute_seconds = 7.000000e+00 : f64, alpa.part = "backward", alpa.read_by_update = array<i64: 2>, alpa.seconds = 9.000000e+00 : f64} (%[[A:.*]]: tensor<8xf32>, %[[B:.*]]: tensor<8xf32>, %[[M:.*]]: tensor<8xf32>)
    // CHECK-NEXT: %[[Y:.*]] = stablehlo.multiply %[[A]], %[[B]]
    // CHECK-SAME: [{"a"}]
    // CHECK-NEXT: %[[Z:.*]] = stablehlo.tanh %[[Y]]
    // What was handed on has its sharding: whole here, and as it was made below.
    // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[Z]] <@mesh_0, [{}]> {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}]>]>}
    // CHECK-NEXT: %[[G:.*]] = stablehlo.multiply %[[Y]], %[[C]]
    // CHECK-NEXT: %[[D:.*]] = sdy.sharding_constraint %[[G]] <@mesh_0, [{}]>
    // CHECK-NEXT: %[[S:.*]] = stablehlo.subtract %[[A]], %[[D]]
    // CHECK-NEXT: %[[N:.*]] = stablehlo.add %[[S]], %[[M]]
    // CHECK-NEXT: mpmd.return %[[Z]], %[[N]]
    // CHECK: return %[[F]]#1, %[[F]]#0
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %x) {alpa.part = "forward", alpa.seconds = 2.0 : f64, alpa.compute_seconds = 1.0 : f64} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %3 = stablehlo.multiply %a, %b {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}]>]>} : tensor<8xf32>
      %4 = stablehlo.tanh %3 : tensor<8xf32>
      mpmd.return %3, %4 : tensor<8xf32>, tensor<8xf32>
    } : (!w, !x) -> (!x, !w)
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0#0, %0#1) {alpa.part = "backward", alpa.seconds = 3.0 : f64, alpa.compute_seconds = 2.0 : f64} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %3 = stablehlo.multiply %a, %b : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!x, !w) -> !w
    %2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %m, %1) {alpa.part = "update", alpa.seconds = 4.0 : f64, alpa.compute_seconds = 4.0 : f64} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      %3 = stablehlo.subtract %a, %c : tensor<8xf32>
      %4 = stablehlo.add %3, %b : tensor<8xf32>
      mpmd.return %4 : tensor<8xf32>
    } : (!w, !w, !w) -> !w
    return %2, %0#1 : !w, !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!v = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @the_last_stage
  func.func public @the_last_stage(%w: !w {alpa.role = "state"}, %v: !v {alpa.role = "state"}, %x: !w {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !v {alpa.result = "state:1"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // CHECK-NEXT: %[[Y:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%w, %x) {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %8 = stablehlo.multiply %a, %b : tensor<8xf32>
      mpmd.return %8 : tensor<8xf32>
    } : (!w, !w) -> !w
    // CHECK: %[[T:.*]] = mpmd.transfer %[[Y]]
    %1 = mpmd.transfer %0 : (!w) -> !v
    // Its update adds over all micro-batches, and stays apart.
    // CHECK-NEXT: %[[G:.*]]:2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1", "layer_1"(1)], stage=1> (%arg1, %[[T]]) {alpa.part = "backward"}
    %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%v, %1) {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %8 = stablehlo.convert %a : (tensor<8xf32>) -> tensor<8xf64>
      %9 = stablehlo.convert %8 : (tensor<8xf64>) -> tensor<8xf32>
      %10 = stablehlo.multiply %9, %b : tensor<8xf32>
      mpmd.return %10 : tensor<8xf32>
    } : (!v, !v) -> !v
    %3:2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1> (%2, %v, %1) {alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      %8 = stablehlo.convert %b : (tensor<8xf32>) -> tensor<8xf64>
      %9 = stablehlo.convert %8 : (tensor<8xf64>) -> tensor<8xf32>
      %10 = stablehlo.multiply %a, %9 : tensor<8xf32>
      %11 = stablehlo.multiply %a, %c : tensor<8xf32>
      mpmd.return %10, %11 : tensor<8xf32>, tensor<8xf32>
    } : (!v, !v, !v) -> (!v, !v)
    // What both parts compute is computed once.
    // CHECK: stablehlo.convert
    // CHECK-NEXT: stablehlo.convert
    // CHECK-NOT: stablehlo.convert
    // CHECK: mpmd.transfer %[[G]]#0
    %4 = mpmd.transfer %3#0 : (!v) -> !w
    // CHECK-NEXT: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
    %5 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%4, %x) {alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %8 = stablehlo.multiply %a, %b : tensor<8xf32>
      mpmd.return %8 : tensor<8xf32>
    } : (!w, !w) -> !w
    // CHECK: mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0>
    %6 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %5) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %8 = stablehlo.add %a, %b : tensor<8xf32>
      mpmd.return %8 : tensor<8xf32>
    } : (!w, !w) -> !w
    // CHECK: mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%arg1, %[[G]]#1)
    %7 = mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%v, %3#1) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %8 = stablehlo.add %a, %b : tensor<8xf32>
      mpmd.return %8 : tensor<8xf32>
    } : (!v, !v) -> !v
    return %6, %7 : !w, !v
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @computed_again
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  func.func public @computed_again(%x: !w) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %2 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %2 : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x, %0) {alpa.part = "backward", alpa.remat = array<i64: 0>} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %2 = stablehlo.tanh %a : tensor<8xf32>
      %3 = stablehlo.multiply %2, %b : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w, !w) -> !w
    return %1 : !w
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}], unreduced={"a"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @a_partial_sum
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  func.func public @a_partial_sum(%w: !w) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !x
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !w
    return %1 : !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @an_update_reads_the_forward_part
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["update_0"]>
  func.func public @an_update_reads_the_forward_part(%w: !w {alpa.role = "state"}, %x: !w {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !w {alpa.result = "mean"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %x) {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %3 = stablehlo.multiply %a, %b : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w, !w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %0, %1) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      %3 = stablehlo.add %a, %b : tensor<8xf32>
      %4 = stablehlo.add %3, %c : tensor<8xf32>
      mpmd.return %4 : tensor<8xf32>
    } : (!w, !w, !w) -> !w
    return %2, %0 : !w, !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @a_state_is_carried
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  func.func public @a_state_is_carried(%s: !w {alpa.role = "state"}, %w: !w {alpa.role = "state"}, %x: !w {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !w {alpa.result = "state:1"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%s, %w, %x) {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      %3 = stablehlo.add %a, %c : tensor<8xf32>
      %4 = stablehlo.multiply %b, %c : tensor<8xf32>
      mpmd.return %3, %4 : tensor<8xf32>, tensor<8xf32>
    } : (!w, !w, !w) -> (!w, !w)
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0#1) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %1) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %3 = stablehlo.add %a, %b : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w, !w) -> !w
    return %0#0, %2 : !w, !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!v = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // The backward part waits for that of another mesh, which begins after all forward parts.
  // CHECK-LABEL: func.func public @a_gradient_comes_later
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1", "layer_1"(1)]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  func.func public @a_gradient_comes_later(%x: !w, %y: !v) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %5 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"]> (%y) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %5 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!v) -> !v
    %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)]> (%1) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      %5 = stablehlo.multiply %a, %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!v) -> !v
    %3 = mpmd.transfer %2 : (!v) -> !w
    %4 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0, %3) {alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %5 = stablehlo.multiply %a, %b : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!w, !w) -> !w
    return %4 : !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!v = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // An update waits for another mesh, or what it reads is sent on first: the backward part does not
  // wait with it.
  // CHECK-LABEL: func.func public @an_update_reads_more
  // CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)]>
  // CHECK: mpmd.transfer
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["update_0"]>
  // CHECK: mpmd.fragment<mesh="mesh_1", origin=["update_1"]>
  func.func public @an_update_reads_more(%x: !w, %y: !v) -> (!w, !v) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)]> (%y) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      %5 = stablehlo.multiply %a, %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!v) -> !v
    %1 = mpmd.transfer %0 : (!v) -> !w
    %2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      %5 = stablehlo.multiply %a, %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!w) -> !w
    %3 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%2, %1) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %5 = stablehlo.add %a, %b : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!w, !w) -> !w
    %4 = mpmd.fragment<mesh="mesh_1", origin=["update_1"]> (%0) {alpa.part = "update"} (%a: tensor<8xf32>) {
      %5 = stablehlo.add %a, %a : tensor<8xf32>
      mpmd.return %5 : tensor<8xf32>
    } : (!v) -> !v
    return %3, %4 : !w, !v
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // The schedule orders the stages of a mesh: the backward of another one may come later.
  // CHECK-LABEL: func.func public @two_stages_of_one_mesh
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_1"], stage=1>
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
  func.func public @two_stages_of_one_mesh(%x: !w) -> (!w, !w) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %3 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"], stage=1> (%0) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %3 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w) -> !w
    %2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%0) {alpa.part = "backward"} (%a: tensor<8xf32>) {
      %3 = stablehlo.multiply %a, %a : tensor<8xf32>
      mpmd.return %3 : tensor<8xf32>
    } : (!w) -> !w
    return %1, %2 : !w, !w
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // The update is that of the mesh, which has the number of its first stage.
  // CHECK-LABEL: func.func public @the_second_part_of_a_later_stage
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "update_1"], stage=2>
  // CHECK-SAME: {alpa.backward = "weight", alpa.part = "backward", alpa.read_by_update = array<i64: 1>}
  func.func public @the_second_part_of_a_later_stage(%x: !w, %w: !w {alpa.role = "state"}) -> (!w {alpa.result = "state:1"}) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1)], stage=2> (%x) {alpa.backward = "weight", alpa.part = "backward"} (%a: tensor<8xf32>) {
      %2 = stablehlo.tanh %a : tensor<8xf32>
      mpmd.return %2 : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_1"], stage=1> (%w, %0) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %2 = stablehlo.subtract %a, %b : tensor<8xf32>
      mpmd.return %2 : tensor<8xf32>
    } : (!w, !w) -> !w
    return %1 : !w
  }
}
