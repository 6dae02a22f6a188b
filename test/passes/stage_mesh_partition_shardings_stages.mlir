// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x8 num-stages=2}' | filecheck %s

// Each stage's mesh has the axes of the program's, also those of one device. Arguments have their
// shardings on every mesh that reads them; constraints name the mesh of their stage.
// CHECK-LABEL: module @constraints
// CHECK: sdy.mesh @mesh_0 = <["d"=2, "t"=2, "e"=1]>
// CHECK: sdy.mesh @mesh_1 = <["d"=2, "t"=2, "e"=1]>
// CHECK-NOT: sdy.mesh
// CHECK: func.func public @main(
// CHECK-SAME: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"d"}, {?}]>> {alpa.input = 0 : i64}
// CHECK-SAME: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{}, {"t", "e"}]>> {alpa.input = 1 : i64}
// CHECK-SAME: !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>, sharding=<@mesh_1, [{}, {"t", "e"}]>> {alpa.input = 1 : i64}
// CHECK-SAME: {devices = array<i64: 0, 1, 2, 3>, hosts = array<i64: 0>, logical_shape = array<i64: 2, 2, 1>, name = "mesh_0"}
// CHECK-SAME: {devices = array<i64: 4, 5, 6, 7>, hosts = array<i64: 0>, logical_shape = array<i64: 2, 2, 1>, name = "mesh_1"}
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
// CHECK: sdy.sharding_constraint %{{.*}} <@mesh_0, [{"d"}, {?}]>
// CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1>
// CHECK: sdy.sharding_constraint %{{.*}} <@mesh_1, [{?}, {"t"}]>
module @constraints {
  sdy.mesh @mine = <["d"=2, "t"=2, "e"=1]>
  func.func public @main(
      %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mine, [{"d"}, {?}]>},
      %w: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mine, [{}, {"t", "e"}]>}) -> tensor<8x8xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) {
      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %2 = sdy.sharding_constraint %1 <@mine, [{"d"}, {?}]> : tensor<8x8xf32>
      mpmd.return %2 : tensor<8x8xf32>
    } : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %3 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) {
      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %2 = sdy.sharding_constraint %1 <@mine, [{?}, {"t"}]> : tensor<8x8xf32>
      mpmd.return %2 : tensor<8x8xf32>
    } : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    return %3 : tensor<8x8xf32>
  }
}

// -----

// A manual computation is over the axes of its stage's mesh. Its collectives' groups number the
// devices of that mesh.
// CHECK-LABEL: module @manual
// CHECK: mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1>
// CHECK: sdy.manual_computation(%{{.*}}) in_shardings=[<@mesh_1, [{"d"}, {"t"}]>] out_shardings=[<@mesh_1, [{"d"}, {}]>] manual_axes={"d", "t"}
// CHECK: replica_groups = dense<{{\[\[}}0, 1], [2, 3]]> : tensor<2x2xi64>
// CHECK: sdy.sharding_constraint %{{.*}} <@mesh_1, []>
module @manual {
  sdy.mesh @mesh_1 = <["d"=2, "t"=2]>
  func.func public @main(%x: tensor<8x8xf32>) -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_1, []>}) {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<8x8xf32>) {
      %1 = stablehlo.tanh %a : tensor<8x8xf32>
      mpmd.return %1 : tensor<8x8xf32>
    } : (tensor<8x8xf32>) -> tensor<8x8xf32>
    %3 = mpmd.named_computation<"layer_1"> (%0) (%a: tensor<8x8xf32>) {
      %1 = sdy.manual_computation(%a) in_shardings=[<@mesh_1, [{"d"}, {"t"}]>] out_shardings=[<@mesh_1, [{"d"}, {}]>] manual_axes={"d", "t"} (%b: tensor<4x4xf32>) {
        %4 = "stablehlo.all_reduce"(%b) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>, use_global_device_ids}> ({
        ^bb0(%c: tensor<f32>, %d: tensor<f32>):
          %5 = stablehlo.add %c, %d : tensor<f32>
          stablehlo.return %5 : tensor<f32>
        }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
        sdy.return %4 : tensor<4x4xf32>
      } : (tensor<8x8xf32>) -> tensor<8x4xf32>
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %2 = stablehlo.reduce(%1 init: %z) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
      mpmd.return %2 : tensor<f32>
    } : (tensor<8x8xf32>) -> tensor<f32>
    return %3 : tensor<f32>
  }
}
