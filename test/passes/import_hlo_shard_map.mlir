// RUN: alpa-opt %s --pipeline='import-hlo' --split-input-file | filecheck %s

// CHECK: sdy.mesh @mesh = <["axis0"=2, "axis1"=4]>
// CHECK-LABEL: func.func public @a_called_body(
// CHECK-SAME: %[[X:.*]]: tensor<8x16xf32>, %[[W:.*]]: tensor<16x4xf32>)
// CHECK-NEXT: %[[R:.*]] = sdy.manual_computation(%[[X]], %[[W]])
// CHECK-SAME: in_shardings=[<@mesh, [{"axis0"}, {"axis1"}]>, <@mesh, [{"axis1"}, {}]>]
// CHECK-SAME: out_shardings=[<@mesh, [{"axis0"}, {}]>] manual_axes={"axis0", "axis1"}
// CHECK-SAME: (%[[A:.*]]: tensor<4x4xf32>, %[[B:.*]]: tensor<4x4xf32>) {
// CHECK-NEXT: %[[C:.*]] = func.call @shmap_body(%[[A]], %[[B]])
// CHECK-NEXT: sdy.return %[[C]] : tensor<4x4xf32>
// CHECK-NEXT: } : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
// CHECK-NEXT: return %[[R]]
module attributes {mhlo.num_partitions = 8 : i32} {
  func.func public @a_called_body(%x: tensor<8x16xf32>, %w: tensor<16x4xf32>) -> tensor<8x4xf32> {
    %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[2,4]<=[8]}"} : (tensor<8x16xf32>) -> tensor<8x16xf32>
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8x16xf32>) -> tensor<4x4xf32>
    %2 = stablehlo.custom_call @Sharding(%w) {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"} : (tensor<16x4xf32>) -> tensor<16x4xf32>
    %3 = stablehlo.custom_call @SPMDFullToShardShape(%2) {mhlo.sharding = "{manual}"} : (tensor<16x4xf32>) -> tensor<4x4xf32>
    %4 = call @shmap_body(%1, %3) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
    %5 = stablehlo.custom_call @Sharding(%4) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
    %6 = stablehlo.custom_call @SPMDShardToFullShape(%5) {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"} : (tensor<4x4xf32>) -> tensor<8x4xf32>
    return %6 : tensor<8x4xf32>
  }
  func.func private @shmap_body(%x: tensor<4x4xf32>, %w: tensor<4x4xf32>) -> tensor<4x4xf32> {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
    %1 = "stablehlo.all_reduce"(%0) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, replica_groups = dense<[[0, 1, 2, 3], [4, 5, 6, 7]]> : tensor<2x4xi64>, use_global_device_ids}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %2 = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }) : (tensor<4x4xf32>) -> tensor<4x4xf32>
    return %1 : tensor<4x4xf32>
  }
}

// -----

// The shardings of one array each would do with two axes; both need three.
// CHECK: sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2, "axis2"=2]>
// CHECK-LABEL: func.func public @mesh(
// CHECK-NEXT: sdy.manual_computation(%{{.*}}) in_shardings=[<@mesh_0, [{"axis0", "axis1"}, {}]>] out_shardings=[<@mesh_0, [{}, {"axis2", "axis0"}]>]
func.func public @mesh(%x: tensor<4x4xf32>) -> tensor<1x16xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<4x4xf32>) -> tensor<1x4xf32>
  %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {mhlo.sharding = "{devices=[1,4,2]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"} : (tensor<1x4xf32>) -> tensor<1x16xf32>
  return %2 : tensor<1x16xf32>
}

// -----

// CHECK-LABEL: func.func public @constants_and_the_device_are_inside(
// CHECK-NEXT: %[[C:.*]] = stablehlo.constant dense<2.000000e+00> : tensor<2xf32>
// CHECK-NEXT: %{{.*}} = stablehlo.partition_id
// CHECK-NEXT: %{{.*}} = stablehlo.convert
// CHECK-NEXT: %[[M:.*]]:2 = sdy.manual_computation(%{{.*}}) {{.*}} (%[[P:.*]]: tensor<2xf32>) {
// CHECK-NEXT: %[[TWO:.*]] = stablehlo.constant dense<2.000000e+00>
// CHECK-NEXT: %[[Q:.*]] = stablehlo.multiply %[[P]], %[[TWO]]
// CHECK-NEXT: %[[ID:.*]] = stablehlo.partition_id
// CHECK-NEXT: %[[F:.*]] = stablehlo.convert %[[ID]]
// CHECK-NEXT: %[[B:.*]] = stablehlo.broadcast_in_dim %[[F]]
// CHECK-NEXT: %[[S:.*]] = stablehlo.add %[[Q]], %[[B]]
// CHECK-NEXT: sdy.return %[[Q]], %[[S]]
// CHECK: stablehlo.tanh %[[M]]#0
// CHECK: stablehlo.add %{{.*}}, %[[M]]#1
func.func public @constants_and_the_device_are_inside(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<2xf32>) {
  %c = stablehlo.constant dense<2.0> : tensor<2xf32>
  %id = stablehlo.partition_id : tensor<ui32>
  %f = stablehlo.convert %id : (tensor<ui32>) -> tensor<f32>
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  %2 = stablehlo.multiply %1, %c : tensor<2xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  %4 = stablehlo.tanh %3 : tensor<8xf32>
  %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<2xf32>
  %5 = stablehlo.add %2, %b : tensor<2xf32>
  %6 = stablehlo.custom_call @SPMDShardToFullShape(%5) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  %7 = stablehlo.add %4, %6 : tensor<8xf32>
  return %7, %c : tensor<8xf32>, tensor<2xf32>
}

// -----

// CHECK-LABEL: func.func public @parts_that_are_not_connected(
// CHECK: sdy.manual_computation(%[[X:.*]]) {{.*}} {
// CHECK-NEXT: stablehlo.tanh
// CHECK: sdy.manual_computation(%[[X]]) {{.*}} {
// CHECK-NEXT: stablehlo.negate
// CHECK: sdy.manual_computation() in_shardings=[] out_shardings=[<@mesh, [{}]>] {{.*}} {
// CHECK-NEXT: stablehlo.constant
func.func public @parts_that_are_not_connected(%x: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>, tensor<2xf32>) {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  %2 = stablehlo.tanh %1 : tensor<2xf32>
  %3 = stablehlo.negate %1 : tensor<2xf32>
  %c = stablehlo.constant dense<2.0> : tensor<2xf32>
  %4 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  %5 = stablehlo.custom_call @SPMDShardToFullShape(%3) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  %6 = stablehlo.custom_call @SPMDShardToFullShape(%c) {mhlo.sharding = "{replicated}"} : (tensor<2xf32>) -> tensor<2xf32>
  return %4, %5, %6 : tensor<8xf32>, tensor<8xf32>, tensor<2xf32>
}

// -----

// CHECK-LABEL: func.func public @in_a_loop(
// CHECK: stablehlo.while
// CHECK: do {
// CHECK: %[[M:.*]] = sdy.manual_computation(%{{.*}})
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh
// CHECK-NEXT: sdy.return %[[T]]
// CHECK: stablehlo.return %{{.*}}, %[[M]]
func.func public @in_a_loop(%x: tensor<8xf32>, %n: tensor<i32>) -> tensor<8xf32> {
  %c = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %c, %a = %x) : tensor<i32>, tensor<8xf32>
  cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %0 = stablehlo.custom_call @Sharding(%a) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
    %2 = stablehlo.tanh %1 : tensor<2xf32>
    %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
    stablehlo.return %j, %3 : tensor<i32>, tensor<8xf32>
  }
  return %r#1 : tensor<8xf32>
}

// -----

// Nothing is cut on one device.
// CHECK-LABEL: func.func public @one_device(
// CHECK: @SPMDFullToShardShape
// CHECK-NOT: sdy.manual_computation
func.func public @one_device(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{replicated}"} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<8xf32>
  %2 = stablehlo.tanh %1 : tensor<8xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{replicated}"} : (tensor<8xf32>) -> tensor<8xf32>
  return %3 : tensor<8xf32>
}
