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
    return %1 : tensor<4x8xf32>
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
