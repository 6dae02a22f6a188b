// RUN: alpa-opt %s --pipeline='layer-cluster{num-layers=2 clustering=equal-ops}' | filecheck %s --check-prefix=EQUAL
// RUN: alpa-opt %s --pipeline='layer-cluster{clustering=manual}' | filecheck %s --check-prefix=MANUAL
// RUN: not alpa-opt %s --pipeline='layer-cluster{clustering=manual num-layers=3}' 2>&1 | filecheck %s --check-prefix=COUNT
// RUN: not alpa-opt %s --pipeline='layer-cluster{clustering=equal-ops num-layers=5}' 2>&1 | filecheck %s --check-prefix=MANY

// Four contractions, the last of which has nearly all the FLOPs, and a marker after the third.

// As many contractions on each side, whatever they cost; the markers do not count.
// EQUAL: mpmd.named_computation<"layer_0"> {{.*}} {alpa.flops = 1088 : i64}
// EQUAL: mpmd.named_computation<"layer_1"> {{.*}} {alpa.flops = 66048 : i64}
// EQUAL-NOT: named_computation

// MANUAL: mpmd.named_computation<"layer_0"> {{.*}} {alpa.flops = 1600 : i64}
// MANUAL: mpmd.named_computation<"layer_1"> {{.*}} {alpa.flops = 65536 : i64}
// MANUAL-NOT: named_computation

// COUNT: layer_cluster_clustering.mlir:24:1: error: the @alpa.layer_boundary markers make 2 layer(s), not 3; leave num-layers out with clustering=manual
// MANY: error: cannot cut 4 contraction(s) into 5 layers of equally many; ask for 1 to 4 with num-layers

!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!b = tensor<4x1024xf32>
!q = tensor<8x1024xf32>
func.func public @contractions(%w: !p, %v: !q, %x: !a) -> !b {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %2 = stablehlo.tanh %1 : !a
  %3 = stablehlo.sine %2 : !a
  %4 = stablehlo.dot_general %3, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %5 = stablehlo.custom_call @alpa.layer_boundary(%4) : (!a) -> !a
  %6 = stablehlo.dot_general %5, %v, contracting_dims = [1] x [0] : (!a, !q) -> !b
  return %6 : !b
}
