// RUN: alpa-opt %s --split-input-file --pipeline='ilp-shard-annotate' --verify-diagnostics | filecheck %s

// Arguments and constraints keep the layouts that the program gives them; closed dimensions are
// not cut further, open ones may be. What a constraint changes, it changes itself.
!w = !mpmd.mesh_tensor<"m", tensor<64x32xf32>, sharding=<@m, [{"b"}, {}]>>
!x = !mpmd.mesh_tensor<"m", tensor<16x64xf32>, sharding=<@m, [{"a", ?}, {?}]>>
!y = !mpmd.mesh_tensor<"m", tensor<16x32xf32>>
// CHECK-LABEL: module @kept
// CHECK: func.func public @main(%{{.*}}: !mpmd.mesh_tensor<"m", tensor<64x32xf32>, sharding=<@m, [{"b"}, {}]>>, %{{.*}}: !mpmd.mesh_tensor<"m", tensor<16x64xf32>, sharding=<@m, [{"a"}, {"b"}]>>)
// CHECK-SAME: -> !mpmd.mesh_tensor<"m", tensor<16x32xf32>, sharding=<@m, [{}, {"b", "a"}]>>
// CHECK: stablehlo.dot_general
// CHECK: sdy.sharding_constraint %{{[0-9]+}} <@m, [{}, {"b", "a"}]>
module @kept {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(%w: !w, %x: !x) -> !y attributes {
      topology = #mpmd.topology<<"m" : <["a"=2, "b"=2]>>>,
      alpa.meshes = [{name = "m", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="m", origin=["layer_0"], stage=0> (%w, %x) {alpa.part = "forward"} (%a: tensor<64x32xf32>, %b: tensor<16x64xf32>) {
      %1 = stablehlo.dot_general %b, %a, contracting_dims = [1] x [0] : (tensor<16x64xf32>, tensor<64x32xf32>) -> tensor<16x32xf32>
      %2 = sdy.sharding_constraint %1 <@m, [{}, {"b", "a"}]> : tensor<16x32xf32>
      mpmd.return %2 : tensor<16x32xf32>
    } : (!w, !x) -> !y
    return %0 : !y
  }
}

// -----

// What is written for shards is one node: its operands are brought into the given shardings.
!x = !mpmd.mesh_tensor<"m", tensor<16x64xf32>, sharding=<@m, [{}, {"a"}]>>
!y = !mpmd.mesh_tensor<"m", tensor<16x64xf32>>
// CHECK-LABEL: module @manual
// CHECK: %[[C:.*]] = sdy.sharding_constraint %{{.*}} <@m, [{"a"}, {}]>
// CHECK: %[[T:.*]] = stablehlo.tanh
// CHECK: sdy.manual_computation(%{{.*}}) in_shardings=[<@m, [{"a"}, {}]>] out_shardings=[<@m, [{"a"}, {?}]>]
// CHECK: sdy.sharding = #sdy.sharding_per_value<[<@m, [{"a"}, {}]>]>
module @manual {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(%x: !x) -> !y attributes {
      topology = #mpmd.topology<<"m" : <["a"=2, "b"=2]>>>,
      alpa.meshes = [{name = "m", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 2, 2>}],
      alpa.plan = {cluster = "cpu:1x4", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="m", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<16x64xf32>) {
      %1 = sdy.sharding_constraint %a <@m, [{"a"}, {}]> : tensor<16x64xf32>
      %2 = stablehlo.tanh %1 {alpa.follow = 0 : i64} : tensor<16x64xf32>
      %3 = sdy.manual_computation(%2) in_shardings=[<@m, [{"a"}, {}]>] out_shardings=[<@m, [{"a"}, {?}]>] manual_axes={"a"} (%b: tensor<8x64xf32>) {
        %4 = stablehlo.cosine %b : tensor<8x64xf32>
        sdy.return %4 : tensor<8x64xf32>
      } : (tensor<16x64xf32>) -> tensor<16x64xf32>
      mpmd.return %3 : tensor<16x64xf32>
    } : (!x) -> !y
    return %0 : !y
  }
}

// -----

// A broadcast that is needed in two layouts is made in both, and in no other one.
!w = !mpmd.mesh_tensor<"m", tensor<64x32xf32>, sharding=<@m, [{"a"}, {}]>>
!x = !mpmd.mesh_tensor<"m", tensor<64x32xf32>, sharding=<@m, [{}, {"a"}]>>
// CHECK-LABEL: module @a_broadcast_in_two_layouts
// CHECK-NOT: stablehlo.broadcast_in_dim {{.*}} [<@m, [{}, {}]>]
// CHECK: stablehlo.broadcast_in_dim {{.*}} {sdy.sharding = #sdy.sharding_per_value<[<@m, [{"a"}, {}]>]>}
// CHECK-NEXT: stablehlo.multiply
// CHECK-NEXT: stablehlo.broadcast_in_dim {{.*}} {sdy.sharding = #sdy.sharding_per_value<[<@m, [{}, {"a"}]>]>}
// CHECK-NEXT: stablehlo.multiply
// CHECK-NEXT: mpmd.return
module @a_broadcast_in_two_layouts {
  sdy.mesh @m = <["a"=2]>
  func.func public @main(%w: !w, %x: !x) -> (!w, !x) attributes {
      topology = #mpmd.topology<<"m" : <["a"=2]>>>,
      alpa.meshes = [{name = "m", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 1 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0:2 = mpmd.fragment<mesh="m", origin=["layer_0"], stage=0> (%w, %x) {alpa.part = "forward"} (%a: tensor<64x32xf32>, %b: tensor<64x32xf32>) {
      %rate = stablehlo.constant dense<0.1> : tensor<f32>
      %1 = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> tensor<64x32xf32>
      %2 = stablehlo.multiply %a, %1 {alpa.follow = 0 : i64} : tensor<64x32xf32>
      %3 = stablehlo.multiply %b, %1 {alpa.follow = 0 : i64} : tensor<64x32xf32>
      mpmd.return %2, %3 : tensor<64x32xf32>, tensor<64x32xf32>
    } : (!w, !x) -> (!w, !x)
    return %0#0, %0#1 : !w, !x
  }
}
