// RUN: alpa-opt %s --pipeline='layer-cluster' --split-input-file | filecheck %s

// A marker begins a layer. Markers are the identity, and gone afterwards.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: func.func public @markers
// CHECK-NOT: alpa.layer_boundary
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0">
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: mpmd.return
// CHECK: %[[L1:.*]] = mpmd.named_computation<"layer_1"> (%[[L0]], %{{.*}})
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"layer_2"> (%[[L1]])
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: stablehlo.sine
// CHECK-NEXT: mpmd.return
// CHECK-NOT: alpa.layer_boundary
// CHECK: return
func.func public @markers(%w: !p, %x: !a) -> !a {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.custom_call @alpa.layer_boundary(%0) : (!a) -> !a
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %3 = stablehlo.dot_general %2, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %4 = stablehlo.custom_call @alpa.layer_boundary(%3) : (!a) -> !a
  %5 = stablehlo.tanh %4 : !a
  %6 = stablehlo.sine %5 : !a
  return %6 : !a
}

// -----

// A marker without values cuts where it stands, and is no op of any layer.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: func.func public @marker_without_values
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0">
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"layer_1"> (%[[L0]], %{{.*}})
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.sine
// CHECK-NEXT: mpmd.return
// CHECK-NOT: named_computation
// CHECK-NOT: alpa.layer_boundary
// CHECK: return
func.func public @marker_without_values(%w: !p, %x: !a) -> !a {
  stablehlo.custom_call @alpa.layer_boundary() {has_side_effect = true} : () -> ()
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.tanh %0 : !a
  stablehlo.custom_call @alpa.layer_boundary() {has_side_effect = true} : () -> ()
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %3 = stablehlo.sine %2 : !a
  return %3 : !a
}

// -----

// Markers at both ends cut off nothing.
!a = tensor<4x8xf32>
// CHECK-LABEL: func.func public @markers_at_the_ends
// CHECK: mpmd.named_computation<"layer_0"> (%{{.*}}) {{.*}} {
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: stablehlo.sine
// CHECK-NEXT: mpmd.return
// CHECK-NOT: named_computation
// CHECK: return
func.func public @markers_at_the_ends(%x: !a) -> !a {
  %0 = stablehlo.custom_call @alpa.layer_boundary(%x) : (!a) -> !a
  %1 = stablehlo.tanh %0 : !a
  %2 = stablehlo.sine %1 : !a
  %3 = stablehlo.custom_call @alpa.layer_boundary(%2) : (!a) -> !a
  return %3 : !a
}

// -----

// Without markers, one layer for every four contractions: here two, of equal FLOPs.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: func.func public @four_contractions_a_layer
// CHECK: mpmd.named_computation<"layer_0"> {{.*}} {alpa.flops = 2048 : i64}
// CHECK: mpmd.named_computation<"layer_1"> {{.*}} {alpa.flops = 2048 : i64}
// CHECK-NOT: named_computation
// CHECK: return
func.func public @four_contractions_a_layer(%w: !p, %x: !a) -> !a {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %3 = stablehlo.dot_general %2, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %4 = stablehlo.dot_general %3, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %5 = stablehlo.dot_general %4, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %6 = stablehlo.dot_general %5, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %7 = stablehlo.dot_general %6, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  return %7 : !a
}

// -----

// A program that computes nothing has a layer, which passes its first result on.
// CHECK-LABEL: func.func public @nothing_to_compute
// CHECK: mpmd.named_computation<"layer_0"> (%{{.*}}) {alpa.flops = 0 : i64} (%[[X:.*]]: tensor<4xf32>)
// CHECK-NEXT: %[[Y:.*]] = stablehlo.optimization_barrier %[[X]] : tensor<4xf32>
// CHECK-NEXT: mpmd.return %[[Y]] : tensor<4xf32>
// CHECK-NOT: named_computation
// CHECK: return %{{.*}} : tensor<4xf32>
func.func public @nothing_to_compute(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
