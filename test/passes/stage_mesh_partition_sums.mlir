// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x4 num-stages=2 mesh-shape=2 num-micro-batches=4 schedule=1f1b}' --split-input-file | filecheck %s

// The gradient that layer_1 makes of the weight of layer_0 is added up on mesh_1 over micro-batches.
// Before the sum crosses, a fragment of mesh_1 returns it, part of the update: its devices need not
// reduce what they have each added up before that.
!x = tensor<64x32xf32>
!w = tensor<32x32xf32>
// CHECK-LABEL: module {
// CHECK: %[[B:.*]]:2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1>
// CHECK: %[[A:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
// CHECK: %[[S:.*]] = mpmd.fragment<mesh="mesh_1", origin=["update_1"], stage=1> (%[[B]]#0) {{{.*}}alpa.part = "update"{{.*}}} (%[[G:.*]]: tensor<32x32xf32>) {
// CHECK-NEXT: mpmd.return %[[G]] : tensor<32x32xf32>
// CHECK: %[[M:.*]] = mpmd.transfer %[[S]]
// CHECK-NEXT: mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%{{.*}}, %[[A]], %[[M]])
func.func public @tied_gradient(%w: !w {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %x: !x {alpa.input = 1 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!x {alpa.output = 0 : i64, alpa.result = "concat:0"}, !w {alpa.output = 1 : i64, alpa.result = "state:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %1 = mpmd.named_computation<"layer_1"> (%0, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %0) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    %6 = stablehlo.cosine %a : !x
    mpmd.return %5, %6 : !w, !x
  } : (!x, !x) -> (!w, !x)
  %3 = mpmd.named_computation<"layer_0"(1)> (%2#1, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %5 : !w
  } : (!x, !x) -> !w
  %4 = mpmd.named_computation<"update_0"> (%w, %3, %2#0) (%a: !w, %b: !w, %c: !w) {
    %5 = stablehlo.add %b, %c : !w
    %6 = stablehlo.subtract %a, %5 : !w
    mpmd.return %6 : !w
  } : (!w, !w, !w) -> !w
  return %1, %4 : !x, !w
}
