// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:2x2}' | filecheck %s --check-prefix=ALL
// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:2x2 meshes-over-hosts=false}' 2>&1 | filecheck %s

// Without the option, one mesh over both hosts is best: the layers have nothing to send inside it.
// With it, each host has a stage.
// ALL: alpa.meshes = [{devices = array<i64: 0, 1, 2, 3>, hosts = array<i64: 0, 1>
// ALL-NOT: dropped
// CHECK: remark: every mesh over several hosts is left out of the search: meshes-over-hosts=false keeps each mesh inside one host
// CHECK: alpa.meshes = [{devices = array<i64: 0, 1>, hosts = array<i64: 0>
// CHECK-SAME: {devices = array<i64: 2, 3>, hosts = array<i64: 1>
// CHECK-SAME: dropped = [{reason = "meshes-over-hosts=false keeps each mesh inside one host", what = "every mesh over several hosts"}]
!a = tensor<4096x64xf32>
!p = tensor<64x64xf32>
func.func public @main(%x: !a, %w0: !p, %w1: !p) -> !a {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w0) {alpa.flops = 1 : i64} (%a: !a, %w: !p) {
    %2 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
    mpmd.return %2 : !a
  } : (!a, !p) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w1) {alpa.flops = 1 : i64} (%a: !a, %w: !p) {
    %2 = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
    mpmd.return %2 : !a
  } : (!a, !p) -> !a
  return %1 : !a
}
