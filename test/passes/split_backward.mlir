// RUN: alpa-opt %s --split-input-file --pipeline='split-backward' | filecheck %s

// The bias' gradient is summed in the first part: nothing else of the second one reads what it sums.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}]>>
!b = !mpmd.mesh_tensor<"mesh_0", tensor<4xf32>, sharding=<@mesh_0, [{}]>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>, sharding=<@mesh_1, [{}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @weights_and_bias
  func.func public @weights_and_bias(%w: !w, %b: !b, %x: !x, %d: !x) -> (!w, !b, !y) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %[[F:.*]]:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%arg3, %arg0) {alpa.backward = "input", alpa.compute_seconds = [[C:.*]] : f64, alpa.part = "backward", alpa.seconds = [[S:.*]] : f64} (%[[D:.*]]: tensor<8x4xf32>, %[[W:.*]]: tensor<4x4xf32>)
    // CHECK-DAG: %[[E:.*]] = stablehlo.tanh %[[D]]
    // CHECK-DAG: %[[P:.*]] = stablehlo.dot_general %[[E]], %[[W]]
    // CHECK-DAG: %[[Z:.*]] = stablehlo.constant
    // CHECK-DAG: %[[Q:.*]] = stablehlo.multiply %[[D]], %[[D]]
    // CHECK-DAG: %[[B:.*]] = stablehlo.reduce(%[[Q]] init: %[[Z]])
    // CHECK: mpmd.return %[[B]], %[[P]], %[[E]]
    // The value that is kept has the sharding that it was made in.
    // CHECK-NEXT: } : {{.*}} -> (!mpmd.mesh_tensor<"mesh_0", tensor<4xf32>, sharding=<@mesh_0, [{}]>>, !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>, !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>)
    // CHECK-NEXT: %[[G:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%arg2, %[[F]]#2) {alpa.backward = "weight"
    // CHECK-NEXT: %[[H:.*]] = stablehlo.dot_general
    // CHECK-NEXT: mpmd.return %[[H]]
    %0:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%w, %x, %d) {alpa.part = "backward", alpa.seconds = 3.0 : f64, alpa.compute_seconds = 2.0 : f64} (%a: tensor<4x4xf32>, %b0: tensor<8x4xf32>, %c: tensor<8x4xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %1 = stablehlo.tanh %c {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
      %2 = stablehlo.dot_general %1, %a, contracting_dims = [1] x [1] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %3 = stablehlo.dot_general %b0, %1, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %q = stablehlo.multiply %c, %c {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
      %4 = stablehlo.reduce(%q init: %zero) applies stablehlo.add across dimensions = [0] : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
      mpmd.return %3, %4, %2 : tensor<4x4xf32>, tensor<4xf32>, tensor<8x4xf32>
    } : (!w, !x, !x) -> (!w, !b, !x)
    %5:2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0#0, %0#1) {alpa.part = "update"} (%a: tensor<4x4xf32>, %c: tensor<4xf32>) {
      %7 = stablehlo.negate %a : tensor<4x4xf32>
      %8 = stablehlo.negate %c : tensor<4xf32>
      mpmd.return %7, %8 : tensor<4x4xf32>, tensor<4xf32>
    } : (!w, !b) -> (!w, !b)
    %6 = mpmd.transfer %0#2 : (!x) -> !y
    return %5#0, %5#1, %6 : !w, !b, !y
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @nothing_leaves
  func.func public @nothing_leaves(%x: !x, %d: !x) -> !w attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    // CHECK-NEXT: mpmd.fragment{{.*}} {alpa.backward = "weight", alpa.part = "backward"}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %d) {alpa.part = "backward"} (%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) {
      %2 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      mpmd.return %2 : tensor<4x4xf32>
    } : (!x, !x) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0) {alpa.part = "update"} (%a: tensor<4x4xf32>) {
      %2 = stablehlo.negate %a : tensor<4x4xf32>
      mpmd.return %2 : tensor<4x4xf32>
    } : (!w) -> !w
    return %1 : !w
  }
}

// -----

// The second result needs the first: nothing is left for a second part.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @all_leaves
  func.func public @all_leaves(%x: !x) -> (!x, !y) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %{{.*}}:2 = mpmd.fragment{{.*}} (%arg0) {alpa.backward = "input", alpa.part = "backward"}
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) {alpa.part = "backward"} (%a: tensor<4x4xf32>) {
      %3 = stablehlo.tanh %a : tensor<4x4xf32>
      %4 = stablehlo.negate %3 : tensor<4x4xf32>
      mpmd.return %3, %4 : tensor<4x4xf32>, tensor<4x4xf32>
    } : (!x) -> (!x, !x)
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0#0) {alpa.part = "update"} (%a: tensor<4x4xf32>) {
      %3 = stablehlo.negate %a : tensor<4x4xf32>
      mpmd.return %3 : tensor<4x4xf32>
    } : (!x) -> !x
    %2 = mpmd.transfer %0#1 : (!x) -> !y
    return %1, %2 : !x, !y
  }
}

// -----

// A loop over layers becomes two; the second reads the gradients of activations from a stack.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!s = !mpmd.mesh_tensor<"mesh_0", tensor<3x8x4xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<3x4x4xf32>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @loop
  func.func public @loop(%w: !w, %x: !s, %d: !x) -> (!w, !y) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment{{.*}} (%arg2, %arg0) {alpa.backward = "input"
    // CHECK: %[[L:.*]]:4 = stablehlo.while
    // CHECK: %[[R:.*]] = stablehlo.dynamic_slice
    // CHECK: %[[T:.*]] = stablehlo.tanh
    // CHECK: stablehlo.dot_general %[[T]]
    // CHECK: stablehlo.dynamic_update_slice {{.*}} -> tensor<3x8x4xf32>
    // CHECK: mpmd.return %[[L]]#1, %[[L]]#3
    // CHECK: mpmd.fragment{{.*}} (%arg1, %[[F]]#1) {alpa.backward = "weight"
    // CHECK: %[[M:.*]]:4 = stablehlo.while
    // CHECK-NOT: tanh
    // CHECK: stablehlo.dot_general
    // CHECK: mpmd.return %[[M]]#
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%w, %x, %d) {alpa.part = "backward"} (%a: tensor<3x4x4xf32>, %b: tensor<3x8x4xf32>, %c: tensor<8x4xf32>) {
      %i0 = stablehlo.constant dense<0> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %n = stablehlo.constant dense<3> : tensor<i32>
      %zeros = stablehlo.constant dense<0.0> : tensor<3x4x4xf32>
      %r:5 = stablehlo.while(%i = %i0, %dx = %c, %ws = %a, %xs = %b, %g = %zeros) : tensor<i32>, tensor<8x4xf32>, tensor<3x4x4xf32>, tensor<3x8x4xf32>, tensor<3x4x4xf32>
      cond {
        %4 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %4 : tensor<i1>
      } do {
        %4 = stablehlo.dynamic_slice %ws, %i, %i0, %i0, sizes = [1, 4, 4] : (tensor<3x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x4x4xf32>
        %5 = stablehlo.reshape %4 : (tensor<1x4x4xf32>) -> tensor<4x4xf32>
        %6 = stablehlo.dynamic_slice %xs, %i, %i0, %i0, sizes = [1, 8, 4] : (tensor<3x8x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<1x8x4xf32>
        %7 = stablehlo.reshape %6 : (tensor<1x8x4xf32>) -> tensor<8x4xf32>
        %8 = stablehlo.tanh %dx : tensor<8x4xf32>
        %9 = stablehlo.dot_general %8, %5, contracting_dims = [1] x [1] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
        %10 = stablehlo.dot_general %7, %8, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        %11 = stablehlo.reshape %10 : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
        %12 = stablehlo.dynamic_update_slice %g, %11, %i, %i0, %i0 : (tensor<3x4x4xf32>, tensor<1x4x4xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<3x4x4xf32>
        %13 = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %13, %9, %ws, %xs, %12 : tensor<i32>, tensor<8x4xf32>, tensor<3x4x4xf32>, tensor<3x8x4xf32>, tensor<3x4x4xf32>
      }
      mpmd.return %r#4, %r#1 : tensor<3x4x4xf32>, tensor<8x4xf32>
    } : (!w, !s, !x) -> (!w, !x)
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0#0) {alpa.part = "update"} (%a: tensor<3x4x4xf32>) {
      %3 = stablehlo.negate %a : tensor<3x4x4xf32>
      mpmd.return %3 : tensor<3x4x4xf32>
    } : (!w) -> !w
    %2 = mpmd.transfer %0#1 : (!x) -> !y
    return %1, %2 : !w, !y
  }
}

// -----

// A barrier of rematerialisation becomes two; ops that only weights read are computed again there.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @rematerialised
  func.func public @rematerialised(%w: !w, %x: !x, %d: !x) -> (!w, !y) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment{{.*}} {alpa.backward = "input", alpa.part = "backward", alpa.remat = array<i64: 0>} (%[[D:.*]]: tensor<8x4xf32>, %[[W:.*]]: tensor<4x4xf32>)
    // CHECK-NEXT: %[[B:.*]] = stablehlo.optimization_barrier %[[D]]
    // CHECK-NEXT: %[[P:.*]] = stablehlo.dot_general %[[B]], %[[W]]
    // CHECK-NEXT: mpmd.return %[[P]], %[[B]]
    // CHECK: mpmd.fragment{{.*}} (%arg1, %[[F]]#1) {alpa.backward = "weight", alpa.part = "backward", alpa.remat = array<i64: 0>} (%[[X:.*]]: tensor<8x4xf32>, %[[K:.*]]: tensor<8x4xf32>)
    // CHECK-NEXT: %[[A:.*]] = stablehlo.optimization_barrier %[[X]]
    // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[A]]
    // CHECK-NEXT: stablehlo.dot_general %[[T]], %[[K]]
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%w, %x, %d) {alpa.part = "backward", alpa.remat = array<i64: 0>} (%a: tensor<4x4xf32>, %b: tensor<8x4xf32>, %c: tensor<8x4xf32>) {
      %3:2 = stablehlo.optimization_barrier %b, %c : tensor<8x4xf32>, tensor<8x4xf32>
      %4 = stablehlo.tanh %3#0 : tensor<8x4xf32>
      %5 = stablehlo.dot_general %3#1, %a, contracting_dims = [1] x [1] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %6 = stablehlo.dot_general %4, %3#1, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      mpmd.return %6, %5 : tensor<4x4xf32>, tensor<8x4xf32>
    } : (!w, !x, !x) -> (!w, !x)
    %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0#0) {alpa.part = "update"} (%a: tensor<4x4xf32>) {
      %3 = stablehlo.negate %a : tensor<4x4xf32>
      mpmd.return %3 : tensor<4x4xf32>
    } : (!w) -> !w
    %2 = mpmd.transfer %0#1 : (!x) -> !y
    return %1, %2 : !w, !y
  }
}

// -----

// A fragment returns no unevenly sharded value: 8 rows on 3 devices. The fragment stays whole.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{}, {}]>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>, sharding=<@mesh_0, [{}, {}]>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>, sharding=<@mesh_1, [{}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=3]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @uneven
  func.func public @uneven(%w: !w, %x: !x, %d: !x) -> (!w, !y) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=3]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %{{.*}}:2 = mpmd.fragment{{.*}} (%arg0, %arg1, %arg2) {alpa.backward = "input", alpa.part = "backward"}
    // CHECK-NOT: alpa.backward = "weight"
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%w, %x, %d) {alpa.part = "backward"} (%a: tensor<4x4xf32>, %b0: tensor<8x4xf32>, %c: tensor<8x4xf32>) {
      %1 = stablehlo.tanh %c {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
      %2 = stablehlo.dot_general %1, %a, contracting_dims = [1] x [1] : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %3 = stablehlo.dot_general %b0, %1, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      mpmd.return %3, %2 : tensor<4x4xf32>, tensor<8x4xf32>
    } : (!w, !x, !x) -> (!w, !x)
    %5 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%0#0) {alpa.part = "update"} (%a: tensor<4x4xf32>) {
      %7 = stablehlo.negate %a : tensor<4x4xf32>
      mpmd.return %7 : tensor<4x4xf32>
    } : (!w) -> !w
    %6 = mpmd.transfer %0#1 : (!x) -> !y
    return %5, %6 : !w, !y
  }
}
