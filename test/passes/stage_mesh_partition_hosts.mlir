// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:2x4 num-stages=2 num-micro-batches=4 schedule=1f1b}' --split-input-file | filecheck %s

// Two stages are put on a host each; devices are
// numbered over the whole cluster. Under 1F1B the first stage keeps two micro-batches in flight and
// the second one, of 128 MiB each, over four devices: 32 MiB more on each. The batch of four
// micro-batches is 128 MiB a device of the first one, and what it sends 32 MiB; of the second one,
// two versions of what it receives and one of what it sends are 96 MiB.
!a = tensor<4096x8192xf32>
!p = tensor<4096x4096xf32>
// CHECK-LABEL: module {
// CHECK-NEXT: sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2]>
// CHECK-NEXT: sdy.mesh @mesh_1 = <["axis0"=2, "axis1"=2]>
// CHECK: alpa.meshes = [{devices = array<i64: 0, 1, 2, 3>, hosts = array<i64: 0>, logical_shape = array<i64: 2, 2>, name = "mesh_0"}, {devices = array<i64: 4, 5, 6, 7>, hosts = array<i64: 1>, logical_shape = array<i64: 2, 2>, name = "mesh_1"}]
// CHECK-SAME: num_micro_batches = 4 : i64, predicted_peak_bytes = array<i64: 520093696, 419430400>
// CHECK-SAME: schedule = "1f1b"
func.func public @two_hosts(%w0: !p {alpa.role = "state"}, %w1: !p {alpa.role = "state"}, %x: !a {alpa.role = "batch", alpa.batch_dim = 1 : i64})
    -> (!p {alpa.result = "state:0"}, !p {alpa.result = "state:1"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w0) {alpa.flops = 1 : i64} (%a: !a, %w: !p) {
    %6 = stablehlo.dot_general %w, %a, contracting_dims = [1] x [0] : (!p, !a) -> !a
    mpmd.return %6 : !a
  } : (!a, !p) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %w1) {alpa.flops = 1 : i64} (%a: !a, %w: !p) {
    %6 = stablehlo.dot_general %w, %a, contracting_dims = [1] x [0] : (!p, !a) -> !a
    mpmd.return %6 : !a
  } : (!a, !p) -> !a
  %2:2 = mpmd.named_computation<"layer_1"(1)> (%1, %w1) {alpa.flops = 1 : i64} (%a: !a, %w: !p) {
    %6 = stablehlo.dot_general %w, %a, contracting_dims = [0] x [0] : (!p, !a) -> !a
    %7 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [1] : (!a, !a) -> !p
    mpmd.return %6, %7 : !a, !p
  } : (!a, !p) -> (!a, !p)
  %3 = mpmd.named_computation<"layer_0"(1)> (%2#0, %0) {alpa.flops = 1 : i64} (%a: !a, %b: !a) {
    %6 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [1] : (!a, !a) -> !p
    mpmd.return %6 : !p
  } : (!a, !a) -> !p
  %4 = mpmd.named_computation<"update_0"> (%w0, %3) {alpa.flops = 1 : i64} (%w: !p, %g: !p) {
    %6 = stablehlo.subtract %w, %g : !p
    mpmd.return %6 : !p
  } : (!p, !p) -> !p
  %5 = mpmd.named_computation<"update_1"> (%w1, %2#1) {alpa.flops = 1 : i64} (%w: !p, %g: !p) {
    %6 = stablehlo.subtract %w, %g : !p
    mpmd.return %6 : !p
  } : (!p, !p) -> !p
  return %4, %5 : !p, !p
}
