// RUN: alpa-opt %s --split-input-file --pipeline='export-stages' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
!s = !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  // CHECK-LABEL: func.func public @layouts_become_closed_constraints
  // CHECK: alpa.module = @mesh_0.layer_0.forward
  // CHECK: module @mesh_0.layer_0.forward {
  // CHECK-NEXT: sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  // CHECK-NEXT: func.func public @main(%[[A:.*]]: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
  // CHECK-SAME: -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}, tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>})
  func.func public @layouts_become_closed_constraints(%x: !x) -> (!x, !s) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<8x8xf32>) {
      // CHECK-NEXT: %[[C:.*]] = stablehlo.constant dense<0.000000e+00> : tensor<f32>
      %c = stablehlo.constant {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>} dense<0.0> : tensor<f32>
      // Two uses.
      // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[A]] : tensor<8x8xf32>
      // CHECK-NEXT: %[[TC:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{"a"}, {"b"}]>
      %1 = stablehlo.tanh %a {alpa.follow = 0 : i64, sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b", ?}]>]>} : tensor<8x8xf32>
      // A result of the function fixes it.
      // CHECK-NEXT: %[[D:.*]] = stablehlo.dot_general %[[TC]], %[[TC]],
      %2 = stablehlo.dot_general %1, %1, contracting_dims = [1] x [0] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      // Nothing to shard.
      // CHECK-NEXT: %[[R:.*]] = stablehlo.reduce(%[[TC]] init: %[[C]])
      %3 = stablehlo.reduce(%1 init: %c) applies stablehlo.add across dimensions = [0, 1] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>} : (tensor<8x8xf32>, tensor<f32>) -> tensor<f32>
      // CHECK-NEXT: return %[[D]], %[[R]]
      mpmd.return %2, %3 : tensor<8x8xf32>, tensor<f32>
    } : (!x) -> (!x, !s)
    return %0#0, %0#1 : !x, !s
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @a_users_constraint_is_not_doubled
  // CHECK: module @mesh_0.layer_0.forward {
  func.func public @a_users_constraint_is_not_doubled(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8x8xf32>) {
      // CHECK: %[[T:.*]] = stablehlo.tanh
      %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"a"}]>]>} : tensor<8x8xf32>
      // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{}, {"a"}]>
      %2 = sdy.sharding_constraint %1 <@mesh_0, [{}, {"a"}]> : tensor<8x8xf32>
      // CHECK-NEXT: stablehlo.sine %[[C]]
      %3 = stablehlo.sine %2 : tensor<8x8xf32>
      mpmd.return %3 : tensor<8x8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @loops
  // CHECK: module @mesh_0.layer_0.forward {
  func.func public @loops(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %i = stablehlo.constant dense<true> : tensor<i1>
      // CHECK: %[[W:.*]]:2 = stablehlo.while
      // CHECK-NOT: attributes
      %1:2 = stablehlo.while(%k = %i, %s = %a) : tensor<i1>, tensor<8xf32>
        attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>, <@mesh_0, [{"a"}]>]>}
        cond {
          stablehlo.return %k : tensor<i1>
        } do {
          %n = stablehlo.not %k {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>} : tensor<i1>
          // CHECK: %[[T:.*]] = stablehlo.tanh
          // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[T]] <@mesh_0, [{"a"}]>
          // CHECK-NEXT: stablehlo.return %{{.*}}, %[[C]]
          %t = stablehlo.tanh %s {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}]>]>} : tensor<8xf32>
          stablehlo.return %n, %t : tensor<i1>, tensor<8xf32>
        }
      // CHECK: return %[[W]]#1
      mpmd.return %1#1 : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @gradients_are_added_up
  func.func public @gradients_are_added_up(
      %w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !x {alpa.result = "concat:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    // The first result is a gradient, the second too and is needed per micro-batch, the third is no gradient.
    // CHECK: alpa.accumulators = array<i64: 0, 1>, alpa.extra_results = array<i64: 1>, alpa.module = @mesh_0.layer_0.backward
    %g:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%w, %x) {alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      %0 = stablehlo.multiply %a, %b : tensor<8xf32>
      %1 = stablehlo.add %a, %b : tensor<8xf32>
      mpmd.return %0, %0, %1 : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
    } : (!w, !x) -> (!w, !x, !x)
    // CHECK: alpa.donated = array<i64: 0>, alpa.module = @mesh_0.update_0.update
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%w, %g#0, %g#1) {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      %0 = stablehlo.subtract %a, %b : tensor<8xf32>
      %1 = stablehlo.subtract %0, %c : tensor<8xf32>
      mpmd.return %1 : tensor<8xf32>
    } : (!w, !w, !x) -> !w
    return %n, %g#1 : !w, !x
  }
  // CHECK: module @mesh_0.layer_0.backward {
  // CHECK: func.func public @main
  // CHECK-SAME: %[[S0:arg2]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 0 : i32}
  // CHECK-SAME: %[[S1:arg3]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>, tf.aliasing_output = 1 : i32}
  // CHECK-NEXT: %[[G:.*]] = stablehlo.multiply
  // CHECK-NEXT: %[[H:.*]] = stablehlo.add %arg0, %arg1
  // CHECK-NEXT: %[[A0:.*]] = stablehlo.add %[[S0]], %[[G]]
  // CHECK-NEXT: %[[A1:.*]] = stablehlo.add %[[S1]], %[[G]]
  // CHECK-NEXT: return %[[A0]], %[[A1]], %[[H]], %[[G]]
  // CHECK: module @mesh_0.update_0.update {
  // CHECK: func.func public @main(%[[W:arg0]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 0 : i32}
  // CHECK: %[[Q:.*]] = stablehlo.constant dense<2.500000e-01> : tensor<8xf32>
  // CHECK-NEXT: %[[P:.*]] = stablehlo.multiply %arg1, %[[Q]]
  // CHECK-NEXT: %[[B:.*]] = sdy.sharding_constraint %[[P]] <@mesh_0, [{}]>
  // CHECK: %[[D:.*]] = stablehlo.multiply %arg2
  // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[D]] <@mesh_0, [{"a"}]>
  // CHECK-NEXT: %[[N:.*]] = stablehlo.subtract %[[W]], %[[B]]
  // CHECK-NEXT: stablehlo.subtract %[[N]], %[[C]]
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @names_and_donation_on_one_device
  func.func public @names_and_donation_on_one_device(%w: !w {alpa.role = "state"}) -> (!w {alpa.result = "state:0"}, !w) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    // CHECK: @mesh_0.layer_0_2_layer_5_head.update
    // Read again below: not donated.
    // CHECK-NOT: alpa.donated
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0), "layer_2"(0), "layer_5"(0), "head"(0)]> (%w) {alpa.part = "update"} (%a: tensor<8xf32>) {
      // CHECK-NOT: sdy.sharding_constraint
      %1 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}]>]>} : tensor<8xf32>
      %2 = stablehlo.sine %1 : tensor<8xf32>
      mpmd.return %2 : tensor<8xf32>
    } : (!w) -> !w
    // CHECK: @mesh_0.layer_0_2_layer_5_head.update_0
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0), "layer_2"(0), "layer_5"(0), "head"(0)]> (%w) {alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    return %0, %1 : !w, !w
  }
  // CHECK: module @mesh_0.layer_0_2_layer_5_head.update {
  // CHECK: func.func public @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32>
  // CHECK: module @mesh_0.layer_0_2_layer_5_head.update_0 {
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  // CHECK-LABEL: func.func public @a_shard_map_stays_as_it_is
  // CHECK: module @mesh_0.layer_0.forward {
  func.func public @a_shard_map_stays_as_it_is(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      // CHECK: sdy.manual_computation(%arg0) in_shardings=[<@mesh_0, [{"a"}]>] out_shardings=[<@mesh_0, [{"a"}]>] manual_axes={"a"}
      %1 = sdy.manual_computation(%a) in_shardings=[<@mesh_0, [{"a"}]>] out_shardings=[<@mesh_0, [{"a"}]>] manual_axes={"a"} (%b: tensor<4xf32>) {
        // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg1 : tensor<4xf32>
        // CHECK-NEXT: %[[N:.*]] = stablehlo.negate %[[T]] : tensor<4xf32>
        // CHECK-NEXT: sdy.return %[[N]]
        %2 = stablehlo.tanh %b {alpa.follow = 0 : i64, sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"b"}]>]>} : tensor<4xf32>
        %3 = stablehlo.negate %2 {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}]>]>} : tensor<4xf32>
        sdy.return %3 : tensor<4xf32>
      } : (tensor<8xf32>) -> tensor<8xf32>
      mpmd.return %1 : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

// A total in f32 of gradients in bf16: the mean is taken before the update converts it.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xbf16>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xbf16>>
!g = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @a_wide_total
  // CHECK: alpa.accumulators = array<i64: 0>
  // CHECK: module @mesh_0.layer_0.backward {
  // CHECK: func.func public @main(%[[X:.*]]: tensor<8x4xbf16> {{{.*}}}, %[[SUM:.*]]: tensor<4x4xf32> {{{.*}}tf.aliasing_output = 0 : i32})
  // CHECK-NEXT: %[[G:.*]] = stablehlo.dot_general
  // CHECK-NEXT: %[[C:.*]] = stablehlo.convert %[[G]] : (tensor<4x4xbf16>) -> tensor<4x4xf32>
  // CHECK-NEXT: %[[A:.*]] = stablehlo.add %[[SUM]], %[[C]] : tensor<4x4xf32>
  // CHECK-NEXT: return %[[A]]
  // CHECK: module @mesh_0.update_0.update {
  // CHECK: func.func public @main(%{{.*}}: tensor<4x4xbf16> {{{.*}}}, %[[T:.*]]: tensor<4x4xf32>
  // CHECK-NEXT: %[[S:.*]] = stablehlo.constant dense<2.500000e-01> : tensor<4x4xf32>
  // CHECK-NEXT: %[[M:.*]] = stablehlo.multiply %[[T]], %[[S]] : tensor<4x4xf32>
  // CHECK-NEXT: stablehlo.convert %[[M]] : (tensor<4x4xf32>) -> tensor<4x4xbf16>
  func.func public @a_wide_total(%w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.part = "backward"} (%a: tensor<8x4xbf16>) {
      %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xbf16>, tensor<8x4xbf16>) -> tensor<4x4xbf16>
      %3 = stablehlo.convert %2 : (tensor<4x4xbf16>) -> tensor<4x4xf32>
      mpmd.return %3 : tensor<4x4xf32>
    } : (!x) -> !g
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xbf16>, %b: tensor<4x4xf32>) {
      %2 = stablehlo.convert %b : (tensor<4x4xf32>) -> tensor<4x4xbf16>
      %3 = stablehlo.subtract %a, %2 : tensor<4x4xbf16>
      mpmd.return %3 : tensor<4x4xbf16>
    } : (!w, !g) -> !w
    return %1 : !w
  }
}
