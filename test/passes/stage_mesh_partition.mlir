// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x2 num-stages=2}' --split-input-file | filecheck %s

// Two layers on two devices; the value between them is transferred.
!a = tensor<4x8xf32>
// CHECK-LABEL: module {
// CHECK-NEXT: sdy.mesh @mesh_0 = <["axis0"=1]>
// CHECK-NEXT: sdy.mesh @mesh_1 = <["axis0"=1]>
// The name of the public function is @main from here on.
// CHECK-NEXT: func.func public @main
// CHECK-SAME: (%[[X:.*]]: !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>> {alpa.input = 0 : i64})
// CHECK-SAME: -> (!mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>> {alpa.output = 0 : i64})
// CHECK-SAME: alpa.meshes = [{devices = array<i64: 0>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_0"}, {devices = array<i64: 1>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_1"}]
// CHECK-SAME: alpa.plan = {cluster = "cpu:1x2", estimated_step_bound = {{.*}}, estimated_step_seconds = {{.*}}, num_micro_batches = 1 : i64, predicted_peak_bytes = array<i64: 256, 128>, predicted_step_seconds = {{.*}}, schedule = "gpipe"}
// CHECK-SAME: topology = #mpmd.topology<<"mesh_0" : <["axis0"=1]>>, <"mesh_1" : <["axis0"=1]>>>
// CHECK-NEXT: %[[F0:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%[[X]]) {alpa.flops = 32 : i64, alpa.part = "forward", alpa.seconds = {{.*}}} (%[[A:.*]]: tensor<4x8xf32>) {
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[A]] : tensor<4x8xf32>
// CHECK-NEXT: mpmd.return %[[T]] : tensor<4x8xf32>
// CHECK: %[[M:.*]] = mpmd.transfer %[[F0]] : (!mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>>) -> !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>>
// CHECK-NEXT: %[[F1:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%[[M]])
// CHECK: return %[[F1]]
func.func public @two_stages(%x: !a) -> !a {
  %0 = mpmd.named_computation<"layer_0"> (%x) {alpa.flops = 32 : i64} (%a: !a) {
    %2 = stablehlo.tanh %a : !a
    mpmd.return %2 : !a
  } : (!a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0) {alpa.flops = 32 : i64} (%a: !a) {
    %2 = stablehlo.sine %a : !a
    mpmd.return %2 : !a
  } : (!a) -> !a
  return %1 : !a
}

// -----

// Three equal layers make two stages: two of them become one fragment, and what flows between these
// two is no result of it. An argument that both meshes read is one argument for each, with the
// same number; a value that a later stage reads twice is sent once.
!a = tensor<4x8xf32>
// CHECK-LABEL: module {
// CHECK: func.func public @main
// CHECK-SAME: (%[[B0:.*]]: !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>> {alpa.input = 0 : i64}, %[[B1:.*]]: !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>> {alpa.input = 0 : i64}, %[[X:.*]]: !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>> {alpa.input = 1 : i64})
// CHECK-SAME: -> (!mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>> {alpa.output = 0 : i64}, !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>> {alpa.output = 1 : i64})
// CHECK-NEXT: %[[F0:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%[[X]], %[[B0]])
// CHECK: mpmd.transfer %[[F0]]
// CHECK-NOT: mpmd.transfer
// CHECK: %[[F1:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1", "layer_2"], stage=1> (%{{.*}}, %[[B1]]) {alpa.flops = 96 : i64
// CHECK-NEXT: %[[P:.*]] = stablehlo.add
// CHECK-NEXT: %[[Q:.*]] = stablehlo.multiply %[[P]], %{{.*}}
// CHECK-NEXT: %[[R:.*]] = stablehlo.subtract %[[Q]], %{{.*}}
// CHECK-NEXT: mpmd.return %[[R]] : tensor<4x8xf32>
// CHECK: return %[[F1]], %[[F0]]
func.func public @merged_layers(%b: !a, %x: !a) -> (!a, !a) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %b) {alpa.flops = 96 : i64} (%a: !a, %c: !a) {
    %3 = stablehlo.add %a, %c : !a
    %4 = stablehlo.tanh %3 : !a
    %5 = stablehlo.tanh %4 : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %b) {alpa.flops = 64 : i64} (%a: !a, %c: !a) {
    %3 = stablehlo.add %a, %c : !a
    %4 = stablehlo.multiply %3, %a : !a
    mpmd.return %4 : !a
  } : (!a, !a) -> !a
  %2 = mpmd.named_computation<"layer_2"> (%1, %0) {alpa.flops = 32 : i64} (%a: !a, %c: !a) {
    %3 = stablehlo.subtract %a, %c : !a
    mpmd.return %3 : !a
  } : (!a, !a) -> !a
  return %2, %0 : !a, !a
}

// -----

// A tied parameter: one argument and one result for each mesh, each donated to its own; the
// update stands where the first layer is, and its result is sent to the other mesh.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: func.func public @main
// CHECK-SAME: (%[[W0:.*]]: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>> {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %[[W1:.*]]: !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>> {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 2 : i32}, %[[X:.*]]: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>> {alpa.batch_dim = 0 : i64, alpa.input = 1 : i64, alpa.role = "batch"})
// CHECK-SAME: -> (!mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>> {alpa.output = 0 : i64, alpa.result = "concat:0"}, !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>> {alpa.output = 1 : i64, alpa.result = "state:0"}, !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>> {alpa.output = 1 : i64, alpa.result = "state:0"})
// CHECK-NEXT: %[[F0:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%[[X]], %[[W0]])
// CHECK: %[[T0:.*]] = mpmd.transfer %[[F0]]
// CHECK-NEXT: %[[F1:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%[[T0]], %[[W1]])
// CHECK: %[[G1:.*]]:2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1> (%[[F1]], %[[T0]]) {{{.*}}alpa.part = "backward"
// CHECK: %[[T1:.*]] = mpmd.transfer %[[G1]]#1
// CHECK-NEXT: %[[G0:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%[[T1]], %[[X]]) {{{.*}}alpa.part = "backward"
// CHECK: %[[T2:.*]] = mpmd.transfer %[[G1]]#0
// CHECK-NEXT: %[[U:.*]] = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%[[W0]], %[[G0]], %[[T2]]) {{{.*}}alpa.part = "update"
// CHECK: %[[N1:.*]] = mpmd.transfer %[[U]]
// CHECK-NEXT: return %[[F1]], %[[U]], %[[N1]]
func.func public @tied_state(%w: !a {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %x: !a {alpa.input = 1 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!a {alpa.output = 0 : i64, alpa.result = "concat:0"}, !a {alpa.output = 1 : i64, alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    %6 = stablehlo.cosine %a : !a
    mpmd.return %5, %6 : !a, !a
  } : (!a, !a) -> (!a, !a)
  %3 = mpmd.named_computation<"layer_0"(1)> (%2#1, %x) (%a: !a, %b: !a) {
    %5 = stablehlo.multiply %a, %b : !a
    mpmd.return %5 : !a
  } : (!a, !a) -> !a
  %4 = mpmd.named_computation<"update_0"> (%w, %3, %2#0) (%a: !a, %b: !a, %c: !a) {
    %5 = stablehlo.add %b, %c : !a
    %6 = stablehlo.subtract %a, %5 : !a
    mpmd.return %6 : !a
  } : (!a, !a, !a) -> !a
  return %1, %4 : !a, !a
}

// -----

// What mixes layers stands where most of what it reads is made, here mesh_1. The other mesh waits for
// it, so that what follows on mesh_1 is a fragment that comes after it.
!a = tensor<4x8xf32>
!s = tensor<f32>
!t = tensor<2xf32>
// CHECK-LABEL: module {
// CHECK: %[[S:.*]] = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> ({{.*}} {{{.*}}alpa.part = "update"
// CHECK: %[[P:.*]] = mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1>
// CHECK: %[[MS:.*]] = mpmd.transfer %[[S]] : (!mpmd.mesh_tensor<"mesh_0", tensor<f32>>) -> !mpmd.mesh_tensor<"mesh_1", tensor<f32>>
// CHECK-NEXT: %[[N:.*]] = mpmd.fragment<mesh="mesh_1", origin=["update_global"], stage=1> (%[[MS]], %[[P]])
// CHECK: %[[W:.*]] = mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%[[N]])
// CHECK: %[[MN:.*]] = mpmd.transfer %[[N]] : (!mpmd.mesh_tensor<"mesh_1", tensor<f32>>) -> !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
// CHECK-NEXT: %[[V:.*]] = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%[[MN]])
// CHECK: return %[[V]], %[[W]]
func.func public @an_update_that_mixes_layers(%x: !a {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!s, !s) {
  %0:2 = mpmd.named_computation<"layer_0"> (%x) (%a: !a) {
    %zero = stablehlo.constant dense<0.0> : !s
    %7 = stablehlo.tanh %a : !a
    %8 = stablehlo.reduce(%7 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
    mpmd.return %7, %8 : !a, !s
  } : (!a) -> (!a, !s)
  %1 = mpmd.named_computation<"layer_1"> (%0#0) (%a: !a) {
    %zero = stablehlo.constant dense<0.0> : !s
    %7 = stablehlo.tanh %a : !a
    %8 = stablehlo.reduce(%7 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
    mpmd.return %8 : !s
  } : (!a) -> !s
  %2 = mpmd.named_computation<"update_0"> (%0#1) (%a: !s) {
    %7 = stablehlo.multiply %a, %a : !s
    mpmd.return %7 : !s
  } : (!s) -> !s
  %3 = mpmd.named_computation<"update_1"> (%1) (%a: !s) {
    %7 = stablehlo.broadcast_in_dim %a, dims = [] : (!s) -> !t
    mpmd.return %7 : !t
  } : (!s) -> !t
  %4 = mpmd.named_computation<"update_global"> (%2, %3) (%a: !s, %b: !t) {
    %7 = stablehlo.reduce(%b init: %a) applies stablehlo.add across dimensions = [0] : (!t, !s) -> !s
    mpmd.return %7 : !s
  } : (!s, !t) -> !s
  %5 = mpmd.named_computation<"update_0"> (%4) (%a: !s) {
    %7 = stablehlo.sqrt %a : !s
    mpmd.return %7 : !s
  } : (!s) -> !s
  %6 = mpmd.named_computation<"update_1"> (%4) (%a: !s) {
    %7 = stablehlo.rsqrt %a : !s
    mpmd.return %7 : !s
  } : (!s) -> !s
  return %5, %6 : !s, !s
}
