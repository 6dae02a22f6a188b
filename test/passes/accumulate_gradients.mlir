// RUN: alpa-opt %s --split-input-file --pipeline='accumulate-gradients' | filecheck %s

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @gradients
  // The first result is a gradient, the second too and is returned per micro-batch, the third is no gradient.
  // CHECK: alpa.accumulators = array<i64: 0, 1>, alpa.extra_results = array<i64: 1>, alpa.module = @b,
  // CHECK: {alpa.module = @u,
  func.func public @gradients(
      %w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w {alpa.result = "state:0"}, !x {alpa.result = "concat:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %g:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%w, %x) {alpa.module = @b, alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      mpmd.return %a, %b, %b : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
    } : (!w, !x) -> (!w, !x, !x)
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %g#0, %g#1) {alpa.module = @u, alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !w, !x) -> !w
    return %n, %g#1 : !w, !x
  }
  // CHECK: module @b {
  module @b {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%{{.*}}, %[[S0:arg2]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 0 : i32}, %[[S1:arg3]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>, tf.aliasing_output = 1 : i32})
    // CHECK-SAME: -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
    // CHECK-NEXT: %[[A0:.*]] = stablehlo.add %[[S0]], %arg0
    // CHECK-NEXT: %[[A1:.*]] = stablehlo.add %[[S1]], %arg1
    // CHECK-NEXT: return %[[A0]], %[[A1]], %arg1, %arg1
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}) {
      return %w, %x, %x : tensor<8xf32>, tensor<8xf32>, tensor<8xf32>
    }
  }
  // CHECK: module @u {
  module @u {
    sdy.mesh @mesh_0 = <["a"=2]>
    // CHECK: func.func public @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %arg1: tensor<8xf32> {alpa.total = "gradient", sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %arg2: tensor<8xf32> {alpa.total = "gradient", sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %h: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
}

// -----

!s = !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @losses
  // The returned mean is taken from the total.
  // CHECK: {alpa.accumulators = array<i64: 0>, alpa.module = @f,
  func.func public @losses(
      %w: !s {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!s {alpa.result = "state:0"}, !s {alpa.result = "mean"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %l = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %x) {alpa.module = @f, alpa.part = "forward"} (%a: tensor<f32>, %b: tensor<8xf32>) {
      mpmd.return %a : tensor<f32>
    } : (!s, !x) -> !s
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%l) {alpa.module = @u, alpa.part = "update"} (%a: tensor<f32>) {
      mpmd.return %a : tensor<f32>
    } : (!s) -> !s
    return %n, %l : !s, !s
  }
  module @f {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%w: tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}, %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}) {
      return %w : tensor<f32>
    }
  }
  // CHECK: module @u {
  module @u {
    sdy.mesh @mesh_0 = <["a"=1]>
    // CHECK: func.func public @main(%arg0: tensor<f32> {alpa.total = "mean", sdy.sharding = #sdy.sharding<@mesh_0, []>})
    func.func public @main(%l: tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}) -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}) {
      return %l : tensor<f32>
    }
  }
}

// -----

!g = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @behind_a_barrier
  func.func public @behind_a_barrier(
      %w: !g {alpa.role = "state"}, %x: !g {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!g {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %d = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @b, alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!g) -> !g
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%d) {alpa.module = @u, alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!g) -> !g
    return %n : !g
  }
  // The sum passes the barrier: the addition comes before it.
  // CHECK: module @b {
  module @b {
    sdy.mesh @mesh_0 = <["a"=1]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8xf32> {{{.*}}}, %[[T:.*]]: tensor<8xf32> {{{.*}}tf.aliasing_output = 0
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      // CHECK-NEXT: %[[G:.*]] = stablehlo.negate %[[X]]
      // CHECK-NEXT: %[[S:.*]] = stablehlo.add %[[T]], %[[G]]
      // CHECK-NEXT: %[[B:.*]]:2 = stablehlo.optimization_barrier %[[X]], %[[S]]
      // CHECK-NEXT: return %[[B]]#1
      %0 = stablehlo.negate %x : tensor<8xf32>
      %1:2 = stablehlo.optimization_barrier %x, %0 : tensor<8xf32>, tensor<8xf32>
      return %1#1 : tensor<8xf32>
    }
  }
  module @u {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %g : tensor<8xf32>
    }
  }
}

// -----

!g = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @behind_a_barrier_and_read
  func.func public @behind_a_barrier_and_read(
      %w: !g {alpa.role = "state"}, %x: !g {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!g {alpa.result = "state:0"}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %d = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x) {alpa.module = @b, alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!g) -> !g
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%d) {alpa.module = @u, alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!g) -> !g
    return %n : !g
  }
  // What is read behind the barrier is the value: the addition comes after it.
  // CHECK: module @b {
  module @b {
    sdy.mesh @mesh_0 = <["a"=1]>
    // CHECK: func.func public @main(%[[X:.*]]: tensor<8xf32> {{{.*}}}, %[[T:.*]]: tensor<8xf32> {{{.*}}tf.aliasing_output = 0
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      // CHECK-NEXT: %[[G:.*]] = stablehlo.negate %[[X]]
      // CHECK-NEXT: %[[B:.*]]:2 = stablehlo.optimization_barrier %[[X]], %[[G]]
      // CHECK-NEXT: stablehlo.custom_call @reads(%[[B]]#1)
      // CHECK-NEXT: %[[S:.*]] = stablehlo.add %[[T]], %[[B]]#1
      // CHECK-NEXT: return %[[S]]
      %0 = stablehlo.negate %x : tensor<8xf32>
      %1:2 = stablehlo.optimization_barrier %x, %0 : tensor<8xf32>, tensor<8xf32>
      stablehlo.custom_call @reads(%1#1) {has_side_effect = true} : (tensor<8xf32>) -> ()
      return %1#1 : tensor<8xf32>
    }
  }
  module @u {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %g : tensor<8xf32>
    }
  }
}
