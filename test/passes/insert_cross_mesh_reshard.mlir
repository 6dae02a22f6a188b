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
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "send_recv", slow_bytes = 1024 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg0
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
    // CHECK: %[[T:.*]] = mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 1024 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg0
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

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<3x262144xf32>, sharding=<@mesh_0, [{}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<3x262144xf32>, sharding=<@mesh_1, [{}, {"axis1"}]>>
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
    // CHECK: method = "local_all_gather", slow_bytes = 3145728 : i64
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<3x262144xf32>, sharding=<@mesh_1, [{}, {"axis1", "axis0"}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<3x262144xf32>) {
      // CHECK: sdy.sharding_constraint %arg1 <@mesh_1, [{}, {"axis1"}]>
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {"axis1"}]>]>} : tensor<3x262144xf32>
      mpmd.return %2 : tensor<3x262144xf32>
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
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 12 : i64, method = "broadcast", slow_bytes = 12 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg0
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<3xf32>, sharding=<@mesh_1, [{}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 4 : i64, method = "broadcast", slow_bytes = 4 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg1
    %1 = mpmd.transfer %s : (!s0) -> !s1
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 32 : i64, method = "broadcast", slow_bytes = 32 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg2
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
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 128 : i64, method = "send_recv", slow_bytes = 0 : i64}, alpa.seconds = {{[^ ]+}} : f64}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<3x8xf32>, sharding=<@mesh_0, [{}, {}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<3x8xf32>, sharding=<@mesh_1, [{}, {"axis1"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2, "axis1"=2]>
  // Little is sent in as few messages as can be, two over the slow links instead of four.
  // CHECK-LABEL: func.func public @a_small_tensor
  func.func public @a_small_tensor(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2, "axis1"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5, 6, 7>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 96 : i64, method = "broadcast", slow_bytes = 96 : i64}, alpa.seconds = {{[^ ]+}} : f64}
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<3x8xf32>, sharding=<@mesh_1, [{}, {"axis1"}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<3x8xf32>) {
      // CHECK-NOT: sdy.sharding_constraint
      // CHECK: stablehlo.tanh
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {"axis1"}]>]>} : tensor<3x8xf32>
      mpmd.return %2 : tensor<3x8xf32>
    } : (!x1) -> !x1
    return %1 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"left", tensor<8x32xf32>, sharding=<@left, [{"rows"}, {}]>>
!x1 = !mpmd.mesh_tensor<"right", tensor<8x32xf32>, sharding=<@right, [{}, {"model"}]>>
module {
  sdy.mesh @left = <["rows"=2]>
  sdy.mesh @right = <["data"=2, "model"=2]>
  // Axes have the names that the topology gives them. Two hosts want all of it: half of
  // it goes to each, and they exchange the halves.
  // CHECK-LABEL: func.func public @gathered_across_hosts
  func.func public @gathered_across_hosts(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"left" : <["rows"=2]>>, <"right" : <["data"=2, "model"=2]>>>,
      alpa.meshes = [{name = "left", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "right", hosts = array<i64: 1, 2>, devices = array<i64: 2, 3, 4, 5>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:3x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 1024 : i64}, alpa.seconds = {{[^ ]+}} : f64}
    // CHECK-SAME: -> !mpmd.mesh_tensor<"right", tensor<8x32xf32>, sharding=<@right, [{"data"}, {"model"}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    %1 = mpmd.fragment<mesh="right", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<8x32xf32>) {
      // CHECK: sdy.sharding_constraint %arg1 <@right, [{}, {"model"}]>
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@right, [{}, {"model"}]>]>} : tensor<8x32xf32>
      mpmd.return %2 : tensor<8x32xf32>
    } : (!x1) -> !x1
    return %1 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"left", tensor<8x32xf32>, sharding=<@left, [{"rows"}, {}]>>
!x1 = !mpmd.mesh_tensor<"right", tensor<8x32xf32>, sharding=<@right, [{}, {}]>>
module {
  sdy.mesh @left = <["rows"=2]>
  sdy.mesh @right = <["data"=2, "model"=2]>
  // The axis inside hosts is gathered; over the other one the gather would cross hosts.
  // CHECK-LABEL: func.func public @gathered_inside_hosts
  func.func public @gathered_inside_hosts(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"left" : <["rows"=2]>>, <"right" : <["data"=2, "model"=2]>>>,
      alpa.meshes = [{name = "left", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "right", hosts = array<i64: 1, 2>, devices = array<i64: 2, 3, 4, 5>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:3x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 2048 : i64}, alpa.seconds = {{[^ ]+}} : f64}
    // CHECK-SAME: -> !mpmd.mesh_tensor<"right", tensor<8x32xf32>, sharding=<@right, [{"model"}, {}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    %1 = mpmd.fragment<mesh="right", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<8x32xf32>) {
      // CHECK: sdy.sharding_constraint %arg1 <@right, [{}, {}]>
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@right, [{}, {}]>]>} : tensor<8x32xf32>
      mpmd.return %2 : tensor<8x32xf32>
    } : (!x1) -> !x1
    return %1 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<6xf32>, sharding=<@mesh_0, [{"axis0"}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<6xf32>, sharding=<@mesh_1, [{"axis0"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=3]>
  // Two tiles of 3 to three of 2: the middle one has a part of each (Alpa, Fig. 6b).
  // CHECK-LABEL: func.func public @tiles_that_overlap
  func.func public @tiles_that_overlap(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=3]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5, 6>, logical_shape = array<i64: 3>}],
      alpa.plan = {cluster = "cpu:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "send_recv", slow_bytes = 24 : i64}, alpa.seconds = {{[^ ]+}} : f64}
    %0 = mpmd.transfer %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{"axis0"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2]>
  // CHECK-LABEL: func.func public @it_says_how_already
  func.func public @it_says_how_already(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 32 : i64}}
    %0 = mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather", slow_bytes = 32 : i64}} %x : (!x0) -> !x1
    return %0 : !x1
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x32xf32>, sharding=<@mesh_0, [{"axis0"}, {"axis1"}]>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{"axis0", "axis1"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2]>
  sdy.mesh @mesh_1 = <["axis0"=2, "axis1"=2]>
  // One message for each device instead of two; the fragment reshards inside its host.
  // CHECK-LABEL: func.func public @as_it_lies
  func.func public @as_it_lies(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2, "axis1"=2]>>, <"mesh_1" : <["axis0"=2, "axis1"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 2, 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5, 6, 7>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "h100:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    // CHECK: %[[T:.*]] = mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_reshard", slow_bytes = 1024 : i64}, alpa.seconds = {{[^ ]+}} : f64} %arg0
    // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{"axis0"}, {"axis1"}]>>
    %0 = mpmd.transfer %x : (!x0) -> !x1
    // CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"]> (%[[T]])
    // CHECK: %[[L:.*]] = sdy.sharding_constraint %arg1 <@mesh_1, [{"axis0", "axis1"}, {}]>
    // CHECK: stablehlo.tanh %[[L]]
    %1 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<8x32xf32>) {
      %2 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{"axis0", "axis1"}, {}]>]>} : tensor<8x32xf32>
      mpmd.return %2 : tensor<8x32xf32>
    } : (!x1) -> !x1
    return %1 : !x1
  }
}
