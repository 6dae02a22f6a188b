// RUN: alpa-opt %s --split-input-file --pipeline='ilp-shard-annotate' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<256x256xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2]>
  // A large batch is split over all devices.
  // CHECK-LABEL: func.func public @large_batch
  // CHECK-SAME: %arg1: !mpmd.mesh_tensor<"mesh_0", tensor<256x256xf32>, sharding=<@mesh_0, [{}, {}]>>
  // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>, sharding=<@mesh_0, [{"axis0", "axis1"}, {}]>>
  func.func public @large_batch(%x: !x, %w: !w) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2, "axis1"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w) {alpa.part = "forward"} (%a: tensor<4096x256xf32>, %b: tensor<256x256xf32>) {
      // CHECK: stablehlo.dot_general
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0", "axis1"}, {}]>]>
      // CHECK-NOT: sdy.sharding_constraint
      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4096x256xf32>, tensor<256x256xf32>) -> tensor<4096x256xf32>
      // CHECK: stablehlo.tanh
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0", "axis1"}, {}]>]>
      %2 = stablehlo.tanh %1 {alpa.follow = 0 : i64} : tensor<4096x256xf32>
      mpmd.return %2 : tensor<4096x256xf32>
    } : (!x, !w) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<3x1024xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<1024x16384xf32>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<3x16384xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // A huge weight and a small batch: the weight is split, no device reads all of it.
  // CHECK-LABEL: func.func public @huge_weight
  func.func public @huge_weight(%x: !x, %w: !w) -> !y attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w) {alpa.part = "forward"} (%a: tensor<3x1024xf32>, %b: tensor<1024x16384xf32>) {
      // CHECK: stablehlo.dot_general
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"axis0"}]>]>
      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<3x1024xf32>, tensor<1024x16384xf32>) -> tensor<3x16384xf32>
      mpmd.return %1 : tensor<3x16384xf32>
    } : (!x, !w) -> !y
    return %0 : !y
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<3x1024xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<1024x16384xf32>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<3x16384xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // The forward part wants the weight in columns: its update and its new value are so, too.
  // CHECK-LABEL: func.func public @state
  // CHECK-SAME: %arg1: !mpmd.mesh_tensor<"mesh_0", tensor<1024x16384xf32>, sharding=<@mesh_0, [{}, {"axis0"}]>>
  // CHECK-SAME: !mpmd.mesh_tensor<"mesh_0", tensor<1024x16384xf32>, sharding=<@mesh_0, [{}, {"axis0"}]>> {alpa.result = "state:1"}
  func.func public @state(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %w: !w {alpa.role = "state"}) -> (!y {alpa.result = "concat:0"}, !w {alpa.result = "state:1"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%x, %w) {alpa.part = "forward"} (%a: tensor<3x1024xf32>, %b: tensor<1024x16384xf32>) {
      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<3x1024xf32>, tensor<1024x16384xf32>) -> tensor<3x16384xf32>
      mpmd.return %1 : tensor<3x16384xf32>
    } : (!x, !w) -> !y
    %2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)], stage=0> (%w) {alpa.part = "update"} (%b: tensor<1024x16384xf32>) {
      // CHECK: stablehlo.tanh
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"axis0"}]>]>
      %3 = stablehlo.tanh %b {alpa.follow = 0 : i64} : tensor<1024x16384xf32>
      mpmd.return %3 : tensor<1024x16384xf32>
    } : (!w) -> !w
    return %0, %2 : !y, !w
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x4096xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // Rows are sorted, then columns: in between the layout changes, which is shown.
  // CHECK-LABEL: func.func public @reshard
  func.func public @reshard(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<4096x4096xf32>) {
      // CHECK: %[[ROWS:.*]] = "stablehlo.sort"(%{{.*}}) <{dimension = 1
      %1 = "stablehlo.sort"(%a) <{dimension = 1 : i64}> ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        // CHECK: stablehlo.compare
        // CHECK-NOT: sdy.sharding
        // CHECK-SAME: -> tensor<i1>
        %p = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      // CHECK: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>
      }) : (tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
      // CHECK: %[[MOVED:.*]] = sdy.sharding_constraint %[[ROWS]] <@mesh_0, [{}, {"axis0"}]>
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"axis0"}]>]>
      // CHECK: "stablehlo.sort"(%[[MOVED]]) <{dimension = 0
      // CHECK: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"axis0"}]>]>
      %2 = "stablehlo.sort"(%1) <{dimension = 0 : i64}> ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %p = stablehlo.compare LT, %l, %r : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }) : (tensor<4096x4096xf32>) -> tensor<4096x4096xf32>
      mpmd.return %2 : tensor<4096x4096xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<256x256xf32>>
!b = !mpmd.mesh_tensor<"mesh_0", tensor<256xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // A bias and a constant take the layout of what they are added to.
  // CHECK-LABEL: func.func public @bias
  // CHECK-SAME: tensor<256xf32>, sharding=<@mesh_0, [{}]>>
  func.func public @bias(%x: !x, %w: !w, %b: !b) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w, %b) {alpa.part = "forward"} (%a: tensor<4096x256xf32>, %k: tensor<256x256xf32>, %c: tensor<256xf32>) {
      // CHECK: stablehlo.constant {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>}
      %half = stablehlo.constant dense<0.5> : tensor<4096x256xf32>
      // CHECK: stablehlo.broadcast_in_dim
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>
      %1 = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<256xf32>) -> tensor<4096x256xf32>
      %2 = stablehlo.dot_general %a, %k, contracting_dims = [1] x [0] : (tensor<4096x256xf32>, tensor<256x256xf32>) -> tensor<4096x256xf32>
      // CHECK: stablehlo.add
      // CHECK-SAME: [{"axis0"}, {}]
      %3 = stablehlo.add %2, %1 {alpa.follow = 0 : i64} : tensor<4096x256xf32>
      %4 = stablehlo.multiply %3, %half {alpa.follow = 0 : i64} : tensor<4096x256xf32>
      mpmd.return %4 : tensor<4096x256xf32>
    } : (!x, !w, !b) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<256x256xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // A loop variable has one layout: at the start, in the loop, and afterwards.
  // CHECK-LABEL: func.func public @loop
  func.func public @loop(%x: !x, %w: !w) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w) {alpa.part = "forward"} (%a: tensor<4096x256xf32>, %b: tensor<256x256xf32>) {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      // CHECK: stablehlo.while
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>, <@mesh_0, [{"axis0"}, {}]>]>
      %1:2 = stablehlo.while(%i = %zero, %y = %a) : tensor<i32>, tensor<4096x256xf32> cond {
        %n = stablehlo.constant dense<6> : tensor<i32>
        %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %one = stablehlo.constant dense<1> : tensor<i32>
        %j = stablehlo.add %i, %one : tensor<i32>
        // CHECK: stablehlo.dot_general
        // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>
        // CHECK-NOT: sdy.sharding_constraint
        // CHECK: stablehlo.return
        %z = stablehlo.dot_general %y, %b, contracting_dims = [1] x [0] : (tensor<4096x256xf32>, tensor<256x256xf32>) -> tensor<4096x256xf32>
        stablehlo.return %j, %z : tensor<i32>, tensor<4096x256xf32>
      }
      mpmd.return %1#1 : tensor<4096x256xf32>
    } : (!x, !w) -> !x
    return %0 : !x
  }
}

// -----

!i = !mpmd.mesh_tensor<"mesh_0", tensor<i32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<256x256xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // All branches yield the layout of the result.
  // CHECK-LABEL: func.func public @branches
  func.func public @branches(%i: !i, %x: !x, %w: !w) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%i, %x, %w) {alpa.part = "forward"} (%n: tensor<i32>, %a: tensor<4096x256xf32>, %b: tensor<256x256xf32>) {
      // CHECK: "stablehlo.case"
      %1 = "stablehlo.case"(%n) ({
        // CHECK: stablehlo.dot_general
        // CHECK-SAME: [{"axis0"}, {}]
        %2 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<4096x256xf32>, tensor<256x256xf32>) -> tensor<4096x256xf32>
        stablehlo.return %2 : tensor<4096x256xf32>
      }, {
        // CHECK: stablehlo.constant {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>}
        %2 = stablehlo.constant dense<0.0> : tensor<4096x256xf32>
        stablehlo.return %2 : tensor<4096x256xf32>
      // CHECK: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>
      // CHECK-SAME: (tensor<i32>) -> tensor<4096x256xf32>
      }) : (tensor<i32>) -> tensor<4096x256xf32>
      mpmd.return %1 : tensor<4096x256xf32>
    } : (!i, !x, !w) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4096x256xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=4]>
  // A custom call is planned by the rule that it carries, which stays.
  // CHECK-LABEL: func.func public @custom_call
  // CHECK: stablehlo.custom_call @my.kernel
  // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>
  // CHECK-SAME: sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=4096, j=256}
  func.func public @custom_call(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<4096x256xf32>) {
      %1 = stablehlo.custom_call @my.kernel(%a) {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=4096, j=256} need_replication={j}, custom>} : (tensor<4096x256xf32>) -> tensor<4096x256xf32>
      mpmd.return %1 : tensor<4096x256xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<64x64xf32>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<64x64xf32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2]>
  sdy.mesh @mesh_1 = <["axis0"=4]>
  // What crosses meshes lands in parts, even where the consumer runs whole.
  // CHECK-LABEL: func.func public @landing
  // CHECK: mpmd.transfer
  // CHECK-SAME: -> !mpmd.mesh_tensor<"mesh_1", tensor<64x64xf32>, sharding=<@mesh_1, [{{.*}}"axis0"
  func.func public @landing(%x: !x0) -> !x1 attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=4]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 4, 5, 6, 7>, logical_shape = array<i64: 4>}],
      alpa.plan = {cluster = "cpu:2x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<64x64xf32>) {
      %1 = stablehlo.tanh %a {alpa.follow = 0 : i64} : tensor<64x64xf32>
      mpmd.return %1 : tensor<64x64xf32>
    } : (!x0) -> !x0
    %2 = mpmd.transfer %0 : (!x0) -> !x1
    %3 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%2) {alpa.part = "forward"} (%a: tensor<64x64xf32>) {
      // CHECK: %[[WHOLE:.*]] = sdy.sharding_constraint %arg1 <@mesh_1, [{}, {}]>
      // CHECK: stablehlo.custom_call @whole(%[[WHOLE]])
      // CHECK-SAME: sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}, {}]>]>
      %1 = stablehlo.custom_call @whole(%a) {sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=64, j=64} need_replication={i, j}, custom>} : (tensor<64x64xf32>) -> tensor<64x64xf32>
      mpmd.return %1 : tensor<64x64xf32>
    } : (!x1) -> !x1
    return %3 : !x1
  }
}
