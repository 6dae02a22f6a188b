// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x2}' --verify-diagnostics | filecheck %s

// The mesh of the program's shardings is the plan's; those of arguments go into their types, those
// of results become constraints. A mesh that no sharding is over is dropped.
// CHECK-LABEL: module @kept
// CHECK-NOT: @unused
// CHECK: sdy.mesh @mine = <["a"=2]>
// CHECK: func.func public @main(%{{.*}}: !mpmd.mesh_tensor<"mine", tensor<4xf32>, sharding=<@mine, [{"a"}]>> {alpa.input = 0 : i64}, %{{.*}}: !mpmd.mesh_tensor<"mine", tensor<4xf32>> {alpa.input = 1 : i64})
// CHECK-SAME: alpa.meshes = [{{.*}}logical_shape = array<i64: 2>, name = "mine"}]
// CHECK: mpmd.fragment<mesh="mine"
// CHECK-NEXT: %[[Y:.*]] = stablehlo.add
// CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[Y]] <@mine, [{?}]>
// CHECK-NEXT: %[[R:.*]] = sdy.sharding_constraint %[[C]] <@mine, [{}]>
// CHECK-NEXT: mpmd.return %[[R]]
module @kept {
  sdy.mesh @unused = <["b"=8]>
  sdy.mesh @mine = <["a"=2]>
  func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mine, [{"a"}]>}, %y: tensor<4xf32>)
      -> (tensor<4xf32> {sdy.sharding = #sdy.sharding<@mine, [{}]>}) {
    %0 = mpmd.named_computation<"layer_0"> (%x, %y) (%a: tensor<4xf32>, %b: tensor<4xf32>) {
      %1 = stablehlo.add %a, %b : tensor<4xf32>
      %2 = sdy.sharding_constraint %1 <@mine, [{?}]> : tensor<4xf32>
      mpmd.return %2 : tensor<4xf32>
    } : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

// A state's result and its argument are one layout.
// CHECK-LABEL: module @state
// CHECK: func.func public @main(%{{.*}}: !mpmd.mesh_tensor<"mine", tensor<4xf32>, sharding=<@mine, [{"a"}]>>
// CHECK-NOT: sdy.sharding_constraint
module @state {
  sdy.mesh @mine = <["a"=2]>
  func.func public @main(%w: tensor<4xf32> {alpa.role = "state", sdy.sharding = #sdy.sharding<@mine, [{?}]>})
      -> (tensor<4xf32> {alpa.result = "state:0", sdy.sharding = #sdy.sharding<@mine, [{"a"}]>}) {
    %0 = mpmd.named_computation<"update_0"> (%w) (%a: tensor<4xf32>) {
      %1 = stablehlo.tanh %a : tensor<4xf32>
      mpmd.return %1 : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

// What XLA ignores binds nobody.
// CHECK-LABEL: module @hints
// CHECK: sdy.mesh @mesh_0 = <["axis0"=2]>
// CHECK: mpmd.fragment<mesh="mesh_0"
// CHECK-NEXT: stablehlo.tanh %{{[a-z0-9]+}} : tensor<4xf32>
// CHECK-NEXT: mpmd.return
module @hints {
  sdy.mesh @mine = <["a"=4]>
  // expected-remark @+1 {{ignored 2 shardings on ordinary ops and sharding groups, as XLA does: shardings of arguments and results and sdy.sharding_constraint are kept}}
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
      %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mine, [{"a"}]>]>} : tensor<4xf32>
      sdy.sharding_group %1 group_id=0 : tensor<4xf32>
      %2 = sdy.propagation_barrier %1 allowed_direction=NONE : tensor<4xf32>
      mpmd.return %2 : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

// Inline meshes get a name, equal ones are one, one without axes replicates.
// CHECK-LABEL: module @meshes
// CHECK: sdy.mesh @[[M:[a-z_0-9]+]] = <["a"=2]>
// CHECK-NOT: sdy.mesh
// CHECK: sdy.sharding_constraint %{{.*}} <@[[M]], [{"a"}]>
// CHECK: sdy.sharding_constraint %{{.*}} <@[[M]], [{}]>
module @meshes {
  sdy.mesh @empty = <[]>
  sdy.mesh @mine = <["a"=2]>
  func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<mesh<["a"=2]>, [{"a"}]>}) -> tensor<4xf32> {
    %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
      %1 = sdy.sharding_constraint %a <@mine, [{"a"}]> : tensor<4xf32>
      %2 = stablehlo.tanh %1 : tensor<4xf32>
      %3 = sdy.sharding_constraint %2 <@empty, [{}]> : tensor<4xf32>
      mpmd.return %3 : tensor<4xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
