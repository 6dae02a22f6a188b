// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x1 num-micro-batches=4}' | filecheck %s --check-prefix=WIDE
// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x1 num-micro-batches=4 accumulate-dtype=f64}' | filecheck %s --check-prefix=F64
// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x1 num-micro-batches=4 accumulate-dtype=same}' | filecheck %s --check-prefix=SAME
// RUN: alpa-opt %s --split-input-file --pipeline='stage-mesh-partition{cluster=cpu:1x1}' | filecheck %s --check-prefix=ONCE

// The backward fragment converts what is added up, the update converts the total back.
!x = tensor<8x4xbf16>
!w = tensor<4x4xbf16>
// WIDE-LABEL: module {
// WIDE-NOT: accumulate_dtype
// WIDE: origin=["layer_0"(1)]
// WIDE: %[[G:.*]] = stablehlo.dot_general {{.*}} -> tensor<4x4xbf16>
// WIDE-NEXT: %[[C:.*]] = stablehlo.convert %[[G]] {alpa.follow = 0 : i64} : (tensor<4x4xbf16>) -> tensor<4x4xf32>
// WIDE-NEXT: mpmd.return %[[C]] : tensor<4x4xf32>
// WIDE: origin=["update_0"]
// WIDE-SAME: (%[[W:[a-z0-9]+]]: tensor<4x4xbf16>, %[[T:.*]]: tensor<4x4xf32>) {
// WIDE-NEXT: %[[N:.*]] = stablehlo.negate %[[W]]
// WIDE-NEXT: %[[B:.*]] = stablehlo.convert %[[T]] {alpa.follow = 0 : i64} : (tensor<4x4xf32>) -> tensor<4x4xbf16>
// WIDE-NEXT: stablehlo.add %[[N]], %[[B]]
// F64: alpa.plan = {accumulate_dtype = "f64", cluster
// F64: stablehlo.convert %{{.*}} : (tensor<4x4xbf16>) -> tensor<4x4xf64>
// F64: stablehlo.convert %{{.*}} : (tensor<4x4xf64>) -> tensor<4x4xbf16>
// SAME-LABEL: module {
// SAME: alpa.plan = {accumulate_dtype = "same", cluster
// SAME-NOT: stablehlo.convert
// ONCE-LABEL: module {
// ONCE-NOT: stablehlo.convert
func.func public @gradient(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!w {alpa.result = "state:0"}, !x {alpa.result = "concat:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %1 = mpmd.named_computation<"layer_0"(1)> (%0, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %5 : !w
  } : (!x, !x) -> !w
  %2 = mpmd.named_computation<"update_0"> (%w, %1) (%a: !w, %b: !w) {
    %5 = stablehlo.negate %a : !w
    %6 = stablehlo.add %5, %b : !w
    mpmd.return %6 : !w
  } : (!w, !w) -> !w
  return %2, %0 : !w, !x
}

// -----

// A parameter in f32 whose gradient is f16: the update reads the total without rounding it.
!x = tensor<8x4xf16>
!g = tensor<4x4xf16>
!w = tensor<4x4xf32>
// WIDE-LABEL: module {
// WIDE: origin=["update_0"]
// WIDE-SAME: (%[[W:[a-z0-9]+]]: tensor<4x4xf32>, %[[T:.*]]: tensor<4x4xf32>) {
// WIDE-NEXT: stablehlo.subtract %[[W]], %[[T]]
// F64: stablehlo.convert %{{.*}} : (tensor<4x4xf64>) -> tensor<4x4xf32>
// SAME-LABEL: module {
// SAME: origin=["update_0"]
// SAME: stablehlo.convert %{{.*}} : (tensor<4x4xf16>) -> tensor<4x4xf32>
// ONCE-LABEL: module {
// ONCE: origin=["update_0"]
// ONCE: stablehlo.convert %{{.*}} : (tensor<4x4xf16>) -> tensor<4x4xf32>
func.func public @master_weights(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!w {alpa.result = "state:0"}, !x {alpa.result = "concat:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.convert %b : (!w) -> !g
    %6 = stablehlo.dot_general %a, %5, contracting_dims = [1] x [0] : (!x, !g) -> !x
    mpmd.return %6 : !x
  } : (!x, !w) -> !x
  %1 = mpmd.named_computation<"layer_0"(1)> (%0, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !g
    mpmd.return %5 : !g
  } : (!x, !x) -> !g
  %2 = mpmd.named_computation<"update_0"> (%w, %1) (%a: !w, %b: !g) {
    %5 = stablehlo.convert %b : (!g) -> !w
    %6 = stablehlo.subtract %a, %5 : !w
    mpmd.return %6 : !w
  } : (!w, !g) -> !w
  return %2, %0 : !w, !x
}

// -----

// The loss and a gradient are returned, too: they keep their types, updates read wide copies.
!x = tensor<8x4xf16>
!w = tensor<4x4xf16>
!s = tensor<f16>
// WIDE-LABEL: module {
// WIDE: %[[F:.*]]:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
// WIDE: %[[L:.*]] = stablehlo.reduce
// WIDE-NEXT: %[[LC:.*]] = stablehlo.convert %[[L]] {{.*}} -> tensor<f32>
// WIDE-NEXT: mpmd.return %{{.*}}, %[[L]], %[[LC]] : tensor<8x4xf16>, tensor<f16>, tensor<f32>
// WIDE: %[[B:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
// WIDE: mpmd.return %{{.*}}, %{{.*}} : tensor<4x4xf16>, tensor<4x4xf32>
// WIDE: %[[U:.*]] = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%{{.*}}, %[[B]]#1, %[[F]]#2)
// WIDE: return %[[U]], %[[F]]#1, %[[B]]#0
// SAME-LABEL: module {
// SAME-NOT: stablehlo.convert
// ONCE-LABEL: module {
// ONCE-NOT: stablehlo.convert
func.func public @returned(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!w {alpa.result = "state:0"}, !s {alpa.result = "mean"}, !w {alpa.result = "mean"}) {
  %0:2 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    %z = stablehlo.constant dense<0.0> : !s
    %6 = stablehlo.reduce(%5 init: %z) applies stablehlo.add across dimensions = [0, 1] : (!x, !s) -> !s
    mpmd.return %5, %6 : !x, !s
  } : (!x, !w) -> (!x, !s)
  %1 = mpmd.named_computation<"layer_0"(1)> (%0#0, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %5 : !w
  } : (!x, !x) -> !w
  %2 = mpmd.named_computation<"update_0"> (%w, %1, %0#1) (%a: !w, %b: !w, %l: !s) {
    %5 = stablehlo.broadcast_in_dim %l, dims = [] : (!s) -> !w
    %6 = stablehlo.multiply %5, %b : !w
    %7 = stablehlo.subtract %a, %6 : !w
    mpmd.return %7 : !w
  } : (!w, !w, !s) -> !w
  return %2, %0#1, %1 : !w, !s, !w
}

// -----

// The backward computation also returns what it is given: that is the argument of the new one.
!x = tensor<8x4xbf16>
!w = tensor<4x4xbf16>
// WIDE-LABEL: module {
// WIDE: origin=["layer_0"(1)]
// WIDE-SAME: (%{{.*}}: tensor<8x4xbf16>, %[[X:.*]]: tensor<8x4xbf16>) {
// WIDE: mpmd.return %{{.*}}, %[[X]] : tensor<4x4xf32>, tensor<8x4xbf16>
// F64: mpmd.return %{{.*}}, %{{.*}} : tensor<4x4xf64>, tensor<8x4xbf16>
// SAME-LABEL: module {
// SAME-NOT: stablehlo.convert
// ONCE-LABEL: module {
// ONCE-NOT: stablehlo.convert
func.func public @passed(%w: !w {alpa.role = "state", tf.aliasing_output = 0 : i32}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (!w {alpa.result = "state:0"}, !x {alpa.result = "concat:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w) (%a: !x, %b: !w) {
    %5 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (!x, !w) -> !x
    mpmd.return %5 : !x
  } : (!x, !w) -> !x
  %1:2 = mpmd.named_computation<"layer_0"(1)> (%0, %x) (%a: !x, %b: !x) {
    %5 = stablehlo.dot_general %b, %a, contracting_dims = [0] x [0] : (!x, !x) -> !w
    mpmd.return %5, %b : !w, !x
  } : (!x, !x) -> (!w, !x)
  %2 = mpmd.named_computation<"update_0"> (%w, %1#0) (%a: !w, %b: !w) {
    %5 = stablehlo.add %a, %b : !w
    mpmd.return %5 : !w
  } : (!w, !w) -> !w
  return %2, %1#1 : !w, !x
}
