// RUN: alpa-opt %s --split-input-file --pipeline='insert-cross-mesh-reshard' | filecheck %s

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x32xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{}, {"axis0"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  // Two hosts. Each device gets its own half, all of it over the slow links.
  // CHECK-LABEL: func.func public @each_device_its_own_tile
  func.func public @each_device_its_own_tile(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "send_recv", slow_bytes = 1024 : i64}} %arg0
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{}, {"axis0"}]>>
    // CHECK-NOT: sdy.sharding_constraint
    // CHECK: return
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x32xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{}, {}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  // Replicas land in halves; each fragment that reads them gathers.
  // CHECK-LABEL: func.func public @replicas_are_gathered
  func.func public @replicas_are_gathered(%x: !x0) -> (!x1, !x1) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: %[[T:.*]] = mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 1024 : i64}} %arg0
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    // CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"]> (%[[T]], %[[T]])
    // CHECK-SAME: (%[[A:arg1]]: tensor<8x32xf32>, %[[B:arg2]]: tensor<8x32xf32>)
    // CHECK-DAG: %[[GA:.*]] = sdy.sharding_constraint %[[A]] <@mesh_1, [{}, {}]> {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {}]>]>}
    // CHECK-DAG: %[[GB:.*]] = sdy.sharding_constraint %[[B]] <@mesh_1, [{}, {}]>
    // CHECK: stablehlo.add %[[GA]], %[[GB]]
    // CHECK: } : (!mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0, %0) {alpa.part = "forward"} (%a: tensor<8x32xf32>, %b: tensor<8x32xf32>) {
      %2 = stablehlo.add %a, %b {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {}]>]>} : tensor<8x32xf32>
      mpmd.return %2 : tensor<8x32xf32>
    } : (!x1, !x1) -> !x1
    // A fragment that returns it as it is.
    // CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)]> (%[[T]])
    // CHECK: %[[G:.*]] = sdy.sharding_constraint %arg1 <@mesh_1, [{}, {}]>
    // CHECK: mpmd.return %[[G]]
    %3 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)]> (%0) {alpa.part = "backward"} (%a: tensor<8x32xf32>) {
      mpmd.return %a : tensor<8x32xf32>
    } : (!x1) -> !x1
    return %1, %3 : !x1, !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<3x8xf32>, sharding=<@mesh_0, [{}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<3x8xf32>, sharding=<@mesh_1, [{}, {"axis1"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2, "axis1"=2]>
  // The axis that is left over goes where it divides: behind the other one.
  // CHECK-LABEL: func.func public @a_left_over_axis
  func.func public @a_left_over_axis(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2, "axis1"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5, 6, 7>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: method = "local_all_gather", slow_bytes = 96 : i64
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<3x8xf32>, sharding=<@mesh_1, [{}, {"axis1", "axis0"}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<3x8xf32>) {
      // CHECK: sdy.sharding_constraint %arg1 <@mesh_1, [{}, {"axis1"}]>
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {"axis1"}]>]>} : tensor<3x8xf32>
      mpmd.return %2 : tensor<3x8xf32>
    } : (!x1) -> !x1
    return %1 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<3xf32>, sharding=<@mesh_0, [{}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<3xf32>, sharding=<@mesh_1, [{}]>>
!s0 = !mpmd.mesh_tensor<"mesh_0", tensor<f32>, sharding=<@mesh_0, []>>
!s1 = !mpmd.mesh_tensor<"mesh_1", tensor<f32>, sharding=<@mesh_1, []>>
!y0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"axis0"}]>>
!y1 = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  // What cannot be split, and what is returned as it lands, is sent once to a host and copied there.
  // CHECK-LABEL: func.func public @broadcasts
  func.func public @broadcasts(%x: !x0, %s: !s0, %y: !y0) -> (!x1, !y1) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 12 : i64, method = "broadcast", slow_bytes = 12 : i64}} %arg0
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<3xf32>, sharding=<@mesh_1, [{}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 4 : i64, method = "broadcast", slow_bytes = 4 : i64}} %arg1
    %1 = mpmd.transfer %s : (!s0) -> !s1
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 32 : i64, method = "broadcast", slow_bytes = 32 : i64}} %arg2
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{}]>>
    %2 = mpmd.transfer %y : (!y0) -> !y1
    // CHECK: mpmd.fragment
    // CHECK-NOT: sdy.sharding_constraint
    // CHECK: stablehlo.add
    %3 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0, %1, %2) {alpa.part = "forward"} (%a: tensor<3xf32>, %b: tensor<f32>, %c: tensor<8xf32>) {
      %4 = stablehlo.add %a, %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}]>]>} : tensor<3xf32>
      mpmd.return %4 : tensor<3xf32>
    } : (!x1, !s1, !y1) -> !x1
    return %3, %2 : !x1, !y1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xbf16>, sharding=<@mesh_0, [{"axis0"}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x8xbf16>, sharding=<@mesh_1, [{"axis0"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  // Inside one host nothing is slow.
  // CHECK-LABEL: func.func public @one_host
  func.func public @one_host(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 128 : i64, method = "send_recv", slow_bytes = 0 : i64}}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}
