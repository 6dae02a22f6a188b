// RUN: alpa-opt %s --split-input-file --pipeline='lower-partial-sums' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a"}>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @parts_are_kept
  // The plan stays as it is.
  // CHECK: -> !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a"}>>
  func.func public @parts_are_kept(%x: !x) -> !g attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @m, alpa.part = "backward"} (%a: tensor<8x4xf32>) {
      %1 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      mpmd.return %1 : tensor<4x4xf32>
    } : (!x) -> !g
    return %0 : !g
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
    // CHECK-SAME: -> (tensor<2x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}, {}]>})
    func.func public @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
        -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"a"}>}) {
      // CHECK-NEXT: %[[P:.*]] = sdy.manual_computation(%[[X]], %[[X]]) in_shardings=[<@mesh_0, [{"a"}, {}]>, <@mesh_0, [{"a"}, {}]>] out_shardings=[<@mesh_0, [{"a"}, {}, {}]>] manual_axes={"a"} (%[[A:.*]]: tensor<4x4xf32>, %[[B:.*]]: tensor<4x4xf32>) {
      // CHECK-NEXT: %[[D:.*]] = stablehlo.dot_general %[[A]], %[[B]],
      // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[D]] <@mesh_0, [{}, {}]>
      // CHECK-NEXT: %[[R:.*]] = stablehlo.reshape %[[C]] : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
      // CHECK-NEXT: sdy.return %[[R]]
      %0 = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}], unreduced={"a"}>]>} : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      // CHECK: %[[N:.*]] = sdy.manual_computation(%[[P]]) in_shardings=[<@mesh_0, [{"a"}, {}, {}]>]
      // CHECK-NEXT: %[[Q:.*]] = stablehlo.reshape %{{.*}} : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
      // CHECK-NEXT: stablehlo.negate %[[Q]] : tensor<4x4xf32>
      // CHECK: return %[[N]] : tensor<2x4x4xf32>
      %1 = stablehlo.negate %0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}], unreduced={"a"}>]>} : tensor<4x4xf32>
      return %1 : tensor<4x4xf32>
    }
  }
}

// -----

!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @a_constraint_adds_parts_up
  func.func public @a_constraint_adds_parts_up(%g: !g) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g) {alpa.module = @m, alpa.part = "update"} (%a: tensor<4x4xf32>) {
      mpmd.return %a : tensor<4x4xf32>
    } : (!g) -> !w
    return %0 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%[[G:.*]]: tensor<2x4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}, {}]>})
    func.func public @main(%g: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"a"}>})
        -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
      // An all-reduce, then a slice.
      // CHECK: %[[S:.*]] = stablehlo.reduce(%[[G]] init: %{{.*}}) applies stablehlo.add across dimensions = [0]
      // CHECK-NEXT: %[[R:.*]] = sdy.sharding_constraint %[[S]] <@mesh_0, [{}, {}]>
      // CHECK-NEXT: sdy.sharding_constraint %[[R]] <@mesh_0, [{"a"}, {}]>
      %0 = sdy.sharding_constraint %g <@mesh_0, [{"a"}, {}]> {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
}

// -----

!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a", "b"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{"b"}, {"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=4]>
  // CHECK-LABEL: func.func public @axes_that_cut_two_dimensions
  func.func public @axes_that_cut_two_dimensions(%g: !g) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=4]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g) {alpa.module = @m, alpa.part = "update"} (%a: tensor<4x4xf32>) {
      mpmd.return %a : tensor<4x4xf32>
    } : (!g) -> !w
    return %0 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2, "b"=4]>
    // CHECK: func.func public @main(%[[G:.*]]: tensor<8x4x4xf32>
    func.func public @main(%g: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"a", "b"}>})
        -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"b"}, {"a"}]>}) {
      // One reduce-scatter for each dimension, in their order.
      // CHECK: %[[P:.*]] = stablehlo.reshape %[[G]] : (tensor<8x4x4xf32>) -> tensor<2x4x4x4xf32>
      // CHECK-NEXT: %[[Q:.*]] = sdy.sharding_constraint %[[P]] <@mesh_0, [{"a"}, {"b"}, {}, {}]>
      // CHECK: %[[S:.*]] = stablehlo.reduce(%[[Q]] init: %{{.*}}) applies stablehlo.add across dimensions = [1]
      // CHECK-NEXT: %[[T:.*]] = sdy.sharding_constraint %[[S]] <@mesh_0, [{"a"}, {}, {}]>
      // CHECK-NEXT: %[[U:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{"a"}, {"b"}, {}]>
      // CHECK: %[[V:.*]] = stablehlo.reduce(%[[U]] init: %{{.*}}) applies stablehlo.add across dimensions = [0]
      // CHECK-NEXT: %[[W:.*]] = sdy.sharding_constraint %[[V]] <@mesh_0, [{"b"}, {}]>
      // CHECK-NEXT: sdy.sharding_constraint %[[W]] <@mesh_0, [{"b"}, {"a"}]>
      %0 = sdy.sharding_constraint %g <@mesh_0, [{"b"}, {"a"}]> {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"b"}, {"a"}]>]>} : tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
}

// -----

!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a", "b"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{"b"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=4]>
  // CHECK-LABEL: func.func public @an_axis_that_cuts_nothing
  func.func public @an_axis_that_cuts_nothing(%g: !g) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=4]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g) {alpa.module = @m, alpa.part = "update"} (%a: tensor<4x4xf32>) {
      mpmd.return %a : tensor<4x4xf32>
    } : (!g) -> !w
    return %0 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2, "b"=4]>
    func.func public @main(%g: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"a", "b"}>})
        -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"b"}, {}]>}) {
      // A reduce-scatter, then an all-reduce of what is left.
      // CHECK: %[[S:.*]] = stablehlo.reduce(%{{.*}} init: %{{.*}}) applies stablehlo.add across dimensions = [1]
      // CHECK-NEXT: %[[T:.*]] = sdy.sharding_constraint %[[S]] <@mesh_0, [{"a"}, {}, {}]>
      // CHECK-NEXT: %[[U:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{"a"}, {"b"}, {}]>
      // CHECK: %[[V:.*]] = stablehlo.reduce(%[[U]] init: %{{.*}}) applies stablehlo.add across dimensions = [0]
      // CHECK-NEXT: sdy.sharding_constraint %[[V]] <@mesh_0, [{"b"}, {}]>
      // CHECK-NEXT: return
      %0 = sdy.sharding_constraint %g <@mesh_0, [{"b"}, {}]> {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"b"}, {}]>]>} : tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"a"}>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @parts_pass_a_barrier
  func.func public @parts_pass_a_barrier(%x: !x) -> (!g, !x) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @m, alpa.part = "backward"} (%a: tensor<8x4xf32>) {
      %1 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %2:2 = stablehlo.optimization_barrier %1, %a : tensor<4x4xf32>, tensor<8x4xf32>
      mpmd.return %2#0, %2#1 : tensor<4x4xf32>, tensor<8x4xf32>
    } : (!x) -> (!g, !x)
    return %0#0, %0#1 : !g, !x
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
        -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"a"}>}, tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
      %0 = stablehlo.dot_general %x, %x, contracting_dims = [0] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}], unreduced={"a"}>]>} : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      // CHECK: %[[P:.*]] = sdy.manual_computation
      // CHECK: %[[B:.*]]:2 = stablehlo.optimization_barrier {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}, {}]>, <@mesh_0, [{"a"}, {}]>]>} %[[P]], %{{.*}} : tensor<2x4x4xf32>, tensor<8x4xf32>
      // CHECK-NEXT: return %[[B]]#0, %[[B]]#1 : tensor<2x4x4xf32>, tensor<8x4xf32>
      %1:2 = stablehlo.optimization_barrier {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}], unreduced={"a"}>, <@mesh_0, [{"a"}, {}]>]>} %0, %x : tensor<4x4xf32>, tensor<8x4xf32>
      return %1#0, %1#1 : tensor<4x4xf32>, tensor<8x4xf32>
    }
  }
}
