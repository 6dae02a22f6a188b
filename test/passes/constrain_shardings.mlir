// RUN: alpa-opt %s --split-input-file --pipeline='constrain-shardings' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  func.func public @step(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8xf32>) {
      mpmd.return %a : tensor<8x8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
    func.func public @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
        -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}, tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}) {
      // Constants cost nothing in any sharding.
      // CHECK: %[[C:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      // CHECK-NEXT: %[[I:.*]] = stablehlo.iota dim = 0 : tensor<8x8xf32>
      %c = stablehlo.constant {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>} dense<0.0> : tensor<f32>
      %i = stablehlo.iota dim = 0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x8xf32>
      // Two uses.
      // CHECK-NEXT: %[[T:.*]] = stablehlo.add %arg0, %[[I]] : tensor<8x8xf32>
      // CHECK-NEXT: %[[TC:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{"a"}, {"b"}]>
      %0 = stablehlo.add %x, %i {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b"}]>]>} : tensor<8x8xf32>
      // The result of the function says the same.
      // CHECK-NEXT: %[[D:.*]] = stablehlo.tanh %[[TC]]
      %1 = stablehlo.tanh %0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x8xf32>
      // A scalar cannot be sharded.
      // CHECK-NEXT: %[[R:.*]] = stablehlo.reduce(%[[TC]] init: %[[C]])
      %2 = stablehlo.reduce(%0 init: %c) applies stablehlo.add across dimensions = [0, 1] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>} : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
      // CHECK-NEXT: return %[[D]], %[[R]]
      return %1, %2 : tensor<8x8xf32>, tensor<f32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
!i = !mpmd.mesh_tensor<"mesh_0", tensor<i32>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @slices(%x: !x, %i: !i) -> !y attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x, %i) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8xf32>, %b: tensor<i32>) {
      %1 = stablehlo.dynamic_slice %a, %b, %b, sizes = [8, 4] : (tensor<8x8xf32>, tensor<i32>, tensor<i32>) -> tensor<8x4xf32>
      mpmd.return %1 : tensor<8x4xf32>
    } : (!x, !i) -> !y
    return %0 : !y
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8x8xf32>, %[[I:.*]]: tensor<i32>, %[[N:.*]]: tensor<i8>)
    func.func public @main(%x: tensor<8x8xf32>, %i: tensor<i32>, %n: tensor<i8>)
        -> (tensor<8x4xf32>, tensor<1x4xf32>, tensor<2xf32>) {
      // CHECK: %[[C:.*]] = stablehlo.constant dense<4> : tensor<i32>
      %c = stablehlo.constant dense<4> : tensor<i32>
      %z = stablehlo.constant dense<0.0> : tensor<300xf32>
      // A slice of all rows begins at 0; one of four columns at 4 or before.
      // CHECK: %[[ZERO:.*]] = stablehlo.constant dense<0> : tensor<i32>
      // CHECK: %[[LOW:.*]] = stablehlo.constant dense<0> : tensor<i32>
      // CHECK: %[[HIGH:.*]] = stablehlo.constant dense<4> : tensor<i32>
      // CHECK: %[[J:.*]] = stablehlo.clamp %[[LOW]], %[[I]], %[[HIGH]]
      // CHECK: stablehlo.dynamic_slice %[[X]], %[[ZERO]], %[[J]], sizes = [8, 4]
      %0 = stablehlo.dynamic_slice %x, %i, %i, sizes = [8, 4] : (tensor<8x8xf32>, tensor<i32>, tensor<i32>) -> tensor<8x4xf32>
      // One row is not cut; a constant that is inside stays.
      // CHECK: stablehlo.dynamic_slice %[[X]], %[[I]], %[[C]], sizes = [1, 4]
      %1 = stablehlo.dynamic_slice %x, %i, %c, sizes = [1, 4] : (tensor<8x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
      // The bound is a number of the type.
      // CHECK: stablehlo.constant dense<127> : tensor<i8>
      %2 = stablehlo.dynamic_slice %z, %n, sizes = [2] : (tensor<300xf32>, tensor<i8>) -> tensor<2xf32>
      return %0, %1, %2 : tensor<8x4xf32>, tensor<1x4xf32>, tensor<2xf32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
!i = !mpmd.mesh_tensor<"mesh_0", tensor<i32>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<1x8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @slices_of_slices(%x: !x, %i: !i) -> !y attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x, %i) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8xf32>, %b: tensor<i32>) {
      %1 = stablehlo.constant dense<0.0> : tensor<1x8xf32>
      mpmd.return %1 : tensor<1x8xf32>
    } : (!x, !i) -> !y
    return %0 : !y
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8x8xf32>, %[[I:.*]]: tensor<i32>)
    func.func public @main(%x: tensor<8x8xf32>, %i: tensor<i32>) -> (tensor<1x8xf32>, tensor<8x1xf32>, tensor<1x8xf32>, tensor<1x8xf32>) {
      %z = stablehlo.constant dense<0> : tensor<i32>
      // CHECK: %[[SLICE:.*]] = stablehlo.dynamic_slice %{{.*}} sizes = [4, 8]
      %0 = stablehlo.dynamic_slice %x, %i, %z, sizes = [4, 8] : (tensor<8x8xf32>, tensor<i32>, tensor<i32>) -> tensor<4x8xf32>
      // One row of four begins at 3 or before, also where shards are read.
      // CHECK: sdy.manual_computation(%[[SLICE]], %[[I]]) {{.*}} (%[[SHARD:.*]]: tensor<4x4xf32>, %[[S:.*]]: tensor<i32>)
      // CHECK: %[[LAST:.*]] = stablehlo.constant dense<3> : tensor<i32>
      // CHECK: %[[J:.*]] = stablehlo.clamp %{{.*}}, %[[S]], %[[LAST]]
      // CHECK: stablehlo.dynamic_slice %[[SHARD]], %[[J]], %{{.*}}, sizes = [1, 4]
      %1 = sdy.manual_computation(%0, %i) in_shardings=[<@mesh_0, [{}, {"a"}]>, <@mesh_0, []>] out_shardings=[<@mesh_0, [{}, {"a"}]>] manual_axes={"a"} (%s: tensor<4x4xf32>, %j: tensor<i32>) {
        %c = stablehlo.constant dense<0> : tensor<i32>
        %2 = stablehlo.dynamic_slice %s, %j, %c, sizes = [1, 4] : (tensor<4x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
        sdy.return %2 : tensor<1x4xf32>
      } : (tensor<4x8xf32>, tensor<i32>) -> tensor<1x8xf32>
      // Behind a transpose, too.
      // CHECK: %[[T:.*]] = stablehlo.transpose %[[SLICE]]
      // CHECK: %[[K:.*]] = stablehlo.clamp
      // CHECK: stablehlo.dynamic_slice %[[T]], %{{.*}}, %[[K]], sizes = [8, 1]
      %3 = stablehlo.transpose %0, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>
      %4 = stablehlo.dynamic_slice %3, %z, %i, sizes = [8, 1] : (tensor<8x4xf32>, tensor<i32>, tensor<i32>) -> tensor<8x1xf32>
      // XLA takes slices out of loops, and what they carry may be a slice, too.
      // CHECK: stablehlo.while(%[[N:.*]] = %{{.*}}, %[[C:.*]] = %[[SLICE]], %[[D:.*]] = %[[X]], %[[ROW:.*]] = %{{.*}})
      // CHECK: do
      // CHECK: %[[RESHAPED:.*]] = stablehlo.reshape %[[C]]
      // CHECK: %[[L:.*]] = stablehlo.clamp %{{.*}}, %[[I]], %{{.*}}
      // CHECK: stablehlo.dynamic_slice %[[RESHAPED]], %[[L]], %{{.*}}, sizes = [1, 1, 8]
      // CHECK-NOT: stablehlo.clamp
      // CHECK: stablehlo.dynamic_slice %[[D]], %[[I]], %{{.*}}, sizes = [1, 8]
      %n = stablehlo.constant dense<3> : tensor<i32>
      %o = stablehlo.constant dense<1> : tensor<i32>
      %r = stablehlo.constant dense<0.0> : tensor<1x8xf32>
      %5:4 = stablehlo.while(%k = %z, %c = %0, %d = %x, %row = %r) : tensor<i32>, tensor<4x8xf32>, tensor<8x8xf32>, tensor<1x8xf32>
      cond {
        %6 = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %6 : tensor<i1>
      } do {
        %6 = stablehlo.add %k, %o : tensor<i32>
        %7 = stablehlo.reshape %c : (tensor<4x8xf32>) -> tensor<4x1x8xf32>
        %8 = stablehlo.dynamic_slice %7, %i, %z, %z, sizes = [1, 1, 8] : (tensor<4x1x8xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x1x8xf32>
        %9 = stablehlo.reshape %8 : (tensor<1x1x8xf32>) -> tensor<1x8xf32>
        // The argument is none.
        %10 = stablehlo.dynamic_slice %d, %i, %z, sizes = [1, 8] : (tensor<8x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x8xf32>
        %11 = stablehlo.add %9, %10 : tensor<1x8xf32>
        stablehlo.return %6, %c, %d, %11 : tensor<i32>, tensor<4x8xf32>, tensor<8x8xf32>, tensor<1x8xf32>
      }
      // A sum with something else is no slice.
      // CHECK: %[[SUM:.*]] = stablehlo.add %[[SLICE]],
      // CHECK-NEXT: stablehlo.dynamic_slice %[[SUM]], %[[I]]
      %12 = stablehlo.slice %x [0:4, 0:8] : (tensor<8x8xf32>) -> tensor<4x8xf32>
      %13 = stablehlo.add %0, %12 : tensor<4x8xf32>
      %14 = stablehlo.dynamic_slice %13, %i, %z, sizes = [1, 8] : (tensor<4x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1x8xf32>
      return %1, %4, %5#3, %14 : tensor<1x8xf32>, tensor<8x1xf32>, tensor<1x8xf32>, tensor<1x8xf32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
!i = !mpmd.mesh_tensor<"mesh_0", tensor<3x2xi32>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<3x8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @gathers(%x: !x, %i: !i) -> !y attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x, %i) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8xf32>, %b: tensor<3x2xi32>) {
      %1 = stablehlo.constant dense<0.0> : tensor<3x8xf32>
      mpmd.return %1 : tensor<3x8xf32>
    } : (!x, !i) -> !y
    return %0 : !y
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8x8xf32>, %[[I:.*]]: tensor<3x2xi32>)
    func.func public @main(%x: tensor<8x8xf32>, %i: tensor<3x2xi32>) -> (tensor<3x2x4xf32>, tensor<3x8xf32>) {
      // CHECK: %[[MOST:.*]] = stablehlo.constant dense<[6, 4]> : tensor<2xi32>
      // CHECK: %[[ALL:.*]] = stablehlo.broadcast_in_dim %[[MOST]], dims = [1] : (tensor<2xi32>) -> tensor<3x2xi32>
      // CHECK: %[[J:.*]] = stablehlo.clamp %{{.*}}, %[[I]], %[[ALL]]
      // CHECK: "stablehlo.gather"(%[[X]], %[[J]])
      %0 = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1, 2], start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 2, 4>}> : (tensor<8x8xf32>, tensor<3x2xi32>) -> tensor<3x2x4xf32>
      // Whole rows: an embedding.
      // CHECK: %[[K:.*]] = stablehlo.slice
      // CHECK: "stablehlo.gather"(%[[X]], %[[K]])
      %k = stablehlo.slice %i [0:3, 0:1] : (tensor<3x2xi32>) -> tensor<3x1xi32>
      %1 = "stablehlo.gather"(%x, %k) <{dimension_numbers = #stablehlo.gather<offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1, 8>}> : (tensor<8x8xf32>, tensor<3x1xi32>) -> tensor<3x8xf32>
      return %0, %1 : tensor<3x2x4xf32>, tensor<3x8xf32>
    }
  }
}
