// RUN: alpa-opt %s --split-input-file --pipeline='donate-states' | filecheck %s

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!v = !mpmd.mesh_tensor<"mesh_0", tensor<4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @states_and_other_arguments
  // CHECK: alpa.donated = array<i64: 1, 2>, alpa.module = @m,
  func.func public @states_and_other_arguments(%w: !w {alpa.role = "state"}, %v: !v {alpa.role = "state"}, %x: !w)
      -> (!w {alpa.result = "state:0"}, !v {alpa.result = "state:1"}) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%x, %v, %w) {alpa.module = @m, alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<4xf32>, %c: tensor<8xf32>) {
      mpmd.return %a, %b : tensor<8xf32>, tensor<4xf32>
    } : (!w, !v, !w) -> (!w, !v)
    return %0#0, %0#1 : !w, !v
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=1]>
    // CHECK: func.func public @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %arg1: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 1 : i32}, %arg2: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 0 : i32})
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %v: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %x, %v : tensor<8xf32>, tensor<4xf32>
    }
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!n = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  // CHECK-LABEL: func.func public @read_again_or_of_another_sharding
  // CHECK-NOT: alpa.donated
  // CHECK: module @m {
  // CHECK-NOT: tf.aliasing_output
  func.func public @read_again_or_of_another_sharding(%w: !w {alpa.role = "state"}, %v: !w {alpa.role = "state"})
      -> (!w {alpa.result = "state:0"}, !n {alpa.result = "state:1"}, !w) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %v) {alpa.module = @m, alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      mpmd.return %a, %b : tensor<8xf32>, tensor<8xf32>
    } : (!w, !w) -> (!w, !n)
    return %0#0, %0#1, %w : !w, !n, !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %v: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}) {
      return %w, %v : tensor<8xf32>, tensor<8xf32>
    }
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  // With one micro-batch, a forward part extends a cache in place.
  // CHECK-LABEL: func.func public @cache
  // CHECK: alpa.donated = array<i64: 0>, alpa.module = @m,
  sdy.mesh @mesh_0 = <["a"=1]>
  func.func public @cache(%w: !w {alpa.role = "state"}, %x: !w)
      -> (!w {alpa.result = "state:0"}) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !w) -> !w
    return %0 : !w
  }
  // CHECK: func.func public @main(%arg0: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>, tf.aliasing_output = 0 : i32}, %arg1: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
  module @m {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  // CHECK-LABEL: func.func public @read_by_two
  // CHECK-NOT: alpa.donated
  sdy.mesh @mesh_0 = <["a"=1]>
  func.func public @read_by_two(%w: !w {alpa.role = "state"})
      -> (!w {alpa.result = "state:0"}, !w) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"]> (%w) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    return %1, %0 : !w, !w
  }
  // CHECK: module @m {
  // CHECK-NOT: tf.aliasing_output
  module @m {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!v = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  // A backward part with its update waits for the forward part, here by way of another mesh.
  // CHECK-LABEL: func.func public @merged_with_an_update
  // CHECK: alpa.donated = array<i64: 0>, alpa.module = @back,
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  func.func public @merged_with_an_update(%w: !w {alpa.role = "state"})
      -> (!w {alpa.result = "state:0"}) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.transfer %0 : (!w) -> !v
    %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1", "layer_1"(1)]> (%1) {alpa.module = @n, alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!v) -> !v
    %3 = mpmd.transfer %2 : (!v) -> !w
    %4 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1), "update_0"]> (%w, %3) {alpa.module = @back, alpa.part = "backward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !w) -> !w
    return %4 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
  module @n {
    sdy.mesh @mesh_1 = <["a"=1]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_1, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_1, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
  // CHECK: module @back {
  // CHECK: tf.aliasing_output = 0 : i32
  module @back {
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%w: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}, %g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %w : tensor<8xf32>
    }
  }
}
