// RUN: alpa-opt %s --split-input-file --pipeline='outline-fragments' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"a"}, {?}]>>
!p = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{}, {}], unreduced={"b"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  // CHECK-LABEL: func.func public @copies
  // CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%{{.*}}) {alpa.module = @mesh_0.layer_0.forward, alpa.part = "forward"}
  // The fragment keeps its ops.
  // CHECK-NEXT: stablehlo.tanh %{{.*}} {alpa.follow = 0 : i64, sdy.sharding = {{.*}}[{"a"}, {"b", ?}]
  // CHECK: module @mesh_0.layer_0.forward {
  // CHECK-NEXT: sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  // Shardings are closed; partial sums stay; what has no sharding is held whole.
  // CHECK-NEXT: func.func public @main(
  // CHECK-SAME: %[[X:arg0]]: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}
  // CHECK-SAME: %[[P:arg1]]: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}], unreduced={"b"}>}
  // CHECK-SAME: -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}]>}
  // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[X]] {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b"}]>]>}
  // CHECK-NEXT: return %[[T]], %[[P]]
  func.func public @copies(%x: !x, %p: !p) -> (!w, !p) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>} {
    %0:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x, %p) {alpa.part = "forward"} (%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) {
      %1 = stablehlo.tanh %a {alpa.follow = 0 : i64, sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b", ?}]>]>} : tensor<8x8xf32>
      mpmd.return %1, %b : tensor<8x8xf32>, tensor<8x8xf32>
    } : (!x, !p) -> (!w, !p)
    return %0#0, %0#1 : !w, !p
  }
}

// -----

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @names
  // CHECK: alpa.module = @mesh_0.layer_0_2_layer_5_head.forward,
  // CHECK: alpa.module = @mesh_0.layer_0_2_layer_5_head.forward_0,
  // CHECK: module @mesh_0.layer_0_2_layer_5_head.forward {
  // CHECK: module @mesh_0.layer_0_2_layer_5_head.forward_0 {
  func.func public @names(%w: !w) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0), "layer_2"(0), "layer_5"(0), "head"(0)]> (%w) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0), "layer_2"(0), "layer_5"(0), "head"(0)]> (%0) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    return %1 : !w
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // The functions that a custom call computes with, and theirs, are copied.
  // CHECK-LABEL: func.func public @computations
  // CHECK: module @mesh_0.layer_0.forward {
  // CHECK: func.func public @main(
  // CHECK: stablehlo.custom_call @foo(%{{.*}}) {called_computations = [@outer]}
  // CHECK: func.func private @outer
  // CHECK: stablehlo.custom_call @bar(%{{.*}}) {called_computations = [@inner, @outer]}
  // CHECK: func.func private @inner
  // CHECK-NOT: @unused
  func.func public @computations(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      %1 = stablehlo.custom_call @foo(%a) {called_computations = [@outer]} : (tensor<8xf32>) -> tensor<8xf32>
      mpmd.return %1 : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  func.func private @outer(%a: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.custom_call @bar(%a) {called_computations = [@inner, @outer]} : (tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
  func.func private @inner(%a: tensor<f32>) -> tensor<f32> {
    return %a : tensor<f32>
  }
  func.func private @unused(%a: tensor<f32>) -> tensor<f32> {
    return %a : tensor<f32>
  }
}
