// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file | filecheck %s

// CHECK-NOT: mhlo.
// CHECK: func.func @gspmd(%arg0: tensor<4x8xf32> {alpa.role = "batch"}, %arg1: tensor<4x8xf32>) -> tensor<4x8xf32>
// CHECK-NEXT: %[[A:.*]] = stablehlo.add %arg0, %arg1 {alpa.follow = 0 : i64}
// CHECK-NEXT: return %[[A]]
module @gspmd_module attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func @gspmd(%x: tensor<4x8xf32> {alpa.role = "batch", mhlo.sharding = "{devices=[8,1]<=[8]}"}, %y: tensor<4x8xf32>)
      -> (tensor<4x8xf32> {mhlo.sharding = "{replicated}"}) {
    %0 = stablehlo.custom_call @Sharding(%x) {backend_config = "", mhlo.sharding = "{replicated}"} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    %1 = stablehlo.add %0, %y {mhlo.sharding = "{replicated}"} : tensor<4x8xf32>
    %2 = stablehlo.custom_call @xla.sdy.FuncResultSharding(%1) {has_side_effect = true, mhlo.frontend_attributes = {xla.sdy.sharding = "#sdy.sharding_per_value<[<@mesh, [{}, {}]>]>"}} : (tensor<4x8xf32>) -> tensor<4x8xf32>
    return %2 : tensor<4x8xf32>
  }
}

// -----

// CHECK-NOT: @unused
// CHECK: sdy.mesh @used = <["a"=2]>
// CHECK: sdy.mesh @"used too"
// CHECK-LABEL: @meshes
// CHECK-SAME: sdy.sharding = #sdy.sharding<@used, [{"a"}]>
// CHECK-NEXT: sdy.sharding_constraint %arg0 <@"used too", [{"b"}]>
sdy.mesh @unused = <["a"=4]>
sdy.mesh @used = <["a"=2]>
sdy.mesh @"used too" = <["b"=2]>
func.func @meshes(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@used, [{"a"}]>}) -> tensor<4xf32> {
  %0 = sdy.sharding_constraint %x <@"used too", [{"b"}]> : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @manual_computation_stays
// CHECK: sdy.manual_computation(%arg0)
// CHECK: stablehlo.tanh
sdy.mesh @mesh = <["a"=2]>
func.func @manual_computation_stays(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}]>] out_shardings=[<@mesh, [{"a"}]>] manual_axes={"a"} (%y: tensor<2xf32>) {
    %1 = stablehlo.tanh %y : tensor<2xf32>
    %2 = stablehlo.reshape %1 : (tensor<2xf32>) -> tensor<2xf32>
    sdy.return %2 : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A value has one layout: one that is returned in another is a value of its own.
// CHECK-LABEL: @results_in_other_layouts
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: %[[A:.*]] = sdy.sharding_constraint %arg0 <@mesh, [{}, {"b"}]>
// CHECK-NEXT: %[[B:.*]] = sdy.sharding_constraint %[[T]] <@mesh, [{}, {"a"}]>
// CHECK-NEXT: return %arg0, %[[A]], %[[T]], %[[T]], %[[B]]
sdy.mesh @mesh = <["a"=2, "b"=2, "one"=1]>
func.func @results_in_other_layouts(%x: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>})
    -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {"one"}]>},
        tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"b"}]>},
        tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {?}]>},
        tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {"a"}]>},
        tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"a"}]>}) {
  %0 = stablehlo.tanh %x : tensor<4x4xf32>
  %1 = stablehlo.reshape %x : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %x, %1, %0, %0, %0 : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>
}

// -----

// CHECK-NOT: mhlo.
// CHECK-LABEL: @memory_kinds
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: return %[[T]]
func.func @memory_kinds(%x: tensor<4xf32> {mhlo.memory_kind = "pinned_host"}) -> (tensor<4xf32> {mhlo.memory_kind = "device"}) {
  %0 = stablehlo.custom_call @annotate_device_placement(%x) {has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.tanh %0 : tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

// A shard_map over one device.
// CHECK-LABEL: @collectives_of_one_device
// CHECK-DAG: %[[ID:.*]] = stablehlo.constant dense<0> : tensor<ui32>
// CHECK-DAG: %[[ZERO:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<2xf32>
// CHECK: %[[NONE:.*]] = stablehlo.complex %[[ZERO]], %[[ZERO]]
// CHECK-NEXT: return %[[ID]], %arg0, %arg0, %[[NONE]], %arg0
func.func @collectives_of_one_device(%x: tensor<2xcomplex<f32>>)
    -> (tensor<ui32>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>) {
  %0 = stablehlo.partition_id : tensor<ui32>
  %1 = "stablehlo.all_reduce"(%x) <{replica_groups = dense<0> : tensor<1x1xi64>}> ({
    ^bb0(%a: tensor<complex<f32>>, %b: tensor<complex<f32>>):
      %s = stablehlo.add %a, %b : tensor<complex<f32>>
      stablehlo.return %s : tensor<complex<f32>>
  }) : (tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>>
  %2 = "stablehlo.collective_permute"(%1) <{source_target_pairs = dense<0> : tensor<1x2xi64>}> : (tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>>
  %3 = "stablehlo.collective_permute"(%1) <{source_target_pairs = dense<> : tensor<0x2xi64>}> : (tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>>
  %4 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, replica_groups = dense<0> : tensor<1x1xi64>}> : (tensor<2xcomplex<f32>>) -> tensor<2xcomplex<f32>>
  return %0, %1, %2, %3, %4 : tensor<ui32>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>, tensor<2xcomplex<f32>>
}
