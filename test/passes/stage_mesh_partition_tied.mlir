// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x4 num-stages=2 mesh-shape=2 num-micro-batches=4 schedule=1f1b}' --split-input-file | filecheck %s

// Three uses of a weight: mesh_0 adds the gradients of two, with the transpose that the update had,
// and keeps one accumulator. The update adds the third one, of mesh_1.
!x = tensor<64x32xbf16>
!w = tensor<32x32xbf16>
// CHECK-LABEL: module {
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0", "layer_1"], stage=0>
// CHECK: %[[A:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)], stage=0>
// CHECK-NEXT: %[[G1:.*]] = stablehlo.dot_general
// CHECK-NEXT: stablehlo.cosine
// CHECK-NEXT: %[[W1:.*]] = stablehlo.convert %[[G1]] {{.*}} : (tensor<32x32xbf16>) -> tensor<32x32xf32>
// CHECK-NEXT: %[[T1:.*]] = stablehlo.transpose %[[W1]]
// CHECK-NEXT: %[[G0:.*]] = stablehlo.dot_general
// CHECK-NEXT: %[[W0:.*]] = stablehlo.convert %[[G0]]
// CHECK-NEXT: %[[S:.*]] = stablehlo.add %[[T1]], %[[W0]] {alpa.follow = 0 : i64} : tensor<32x32xf32>
// CHECK-NEXT: mpmd.return %[[S]]
// CHECK: %[[M:.*]] = mpmd.transfer
// CHECK-NEXT: mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%{{.*}}, %[[M]], %[[A]]) {{.*}} (%{{.*}}: tensor<32x32xbf16>, %[[P:.*]]: tensor<32x32xf32>, %[[Q:.*]]: tensor<32x32xf32>) {
// CHECK-NEXT: %[[P16:.*]] = stablehlo.convert %[[P]]
// CHECK-NEXT: %[[Q16:.*]] = stablehlo.convert %[[Q]]
// CHECK-NEXT: stablehlo.add %[[Q16]], %[[P16]]
// CHECK-NEXT: stablehlo.subtract
func.func public @tied(%w: !w {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %x: !x {alpa.input = 1 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!x {alpa.output = 0 : i64, alpa.result = "concat:0"}, !w {alpa.output = 1 : i64, alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %9 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %9 : !x
  } : (!x, !w) -> !x
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !x, %b: !w) {
    %9 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %9 : !x
  } : (!x, !w) -> !x
  %2 = mpmd.named_computation<"layer_2"> (%1, %w) (%a: !x, %b: !w) {
    %9 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [1] : (!x, !w) -> !x
    mpmd.return %9 : !x
  } : (!x, !w) -> !x
  %3:2 = mpmd.named_computation<"layer_2"(1)> (%2, %1) (%a: !x, %b: !x) {
    %9 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %10 = stablehlo.cosine %a : !x
    mpmd.return %9, %10 : !w, !x
  } : (!x, !x) -> (!w, !x)
  %4:2 = mpmd.named_computation<"layer_1"(1)> (%3#1, %0) (%a: !x, %b: !x) {
    %9 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %10 = stablehlo.cosine %a : !x
    mpmd.return %9, %10 : !w, !x
  } : (!x, !x) -> (!w, !x)
  %5 = mpmd.named_computation<"layer_0"(1)> (%4#1, %x) (%a: !x, %b: !x) {
    %9 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %9 : !w
  } : (!x, !x) -> !w
  %6 = mpmd.named_computation<"update_0"> (%w, %3#0, %4#0, %5) (%a: !w, %b: !w, %c: !w, %d: !w) {
    %9 = stablehlo.transpose %c, dims = [1, 0] : (!w) -> !w
    %10 = stablehlo.add %9, %b : !w
    %11 = stablehlo.add %10, %d : !w
    %12 = stablehlo.subtract %a, %11 : !w
    mpmd.return %12 : !w
  } : (!w, !w, !w, !w) -> !w
  return %2, %6 : !x, !w
}

// -----

// What else reads a gradient needs it alone: these stay as they are.
!x = tensor<64x32xf32>
!w = tensor<32x32xf32>
// CHECK-LABEL: module {
// CHECK: mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%{{.*}}, %{{.*}}, %{{.*}})
// CHECK-NEXT: %[[S:.*]] = stablehlo.add
// CHECK-NEXT: stablehlo.multiply
func.func public @norm_of_one(%w: !w {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %x: !x {alpa.input = 1 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!x {alpa.output = 0 : i64, alpa.result = "concat:0"}, !w {alpa.output = 1 : i64, alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: !x) {
    %9 = stablehlo.tanh %a : !x
    mpmd.return %9 : !x
  } : (!x) -> !x
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !x, %b: !w) {
    %9 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %9 : !x
  } : (!x, !w) -> !x
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !x, %b: !x) {
    %9 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %10 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %9, %10 : !w, !w
  } : (!x, !x) -> (!w, !w)
  %3 = mpmd.named_computation<"update_1"> (%w, %2#0, %2#1) (%a: !w, %b: !w, %c: !w) {
    %9 = stablehlo.add %b, %c : !w
    %10 = stablehlo.multiply %9, %b : !w
    %11 = stablehlo.subtract %a, %10 : !w
    mpmd.return %11 : !w
  } : (!w, !w, !w) -> !w
  return %1, %3 : !x, !w
}

// -----

// The sum itself is a new state: the update returns it, because the backward part has one for each
// micro-batch.
!x = tensor<64x32xf32>
!w = tensor<32x32xf32>
// CHECK-LABEL: module {
// CHECK: %[[G:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1>
// CHECK: stablehlo.add
// CHECK: %[[U:.*]] = mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%[[G]])
// CHECK-NEXT: %[[B:.*]] = stablehlo.optimization_barrier
// CHECK-NEXT: mpmd.return %[[B]]
func.func public @sum_is_a_state(%w: !w {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %x: !x {alpa.input = 1 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!x {alpa.output = 0 : i64, alpa.result = "concat:0"}, !w {alpa.output = 1 : i64, alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: !x) {
    %9 = stablehlo.tanh %a : !x
    mpmd.return %9 : !x
  } : (!x) -> !x
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !x, %b: !w) {
    %9 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %9 : !x
  } : (!x, !w) -> !x
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !x, %b: !x) {
    %9 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %10 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %9, %10 : !w, !w
  } : (!x, !x) -> (!w, !w)
  %3 = mpmd.named_computation<"update_1"> (%2#0, %2#1) (%b: !w, %c: !w) {
    %9 = stablehlo.add %b, %c : !w
    mpmd.return %9 : !w
  } : (!w, !w) -> !w
  return %1, %3 : !x, !w
}
