// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x1 remat=layer}' --split-input-file | filecheck %s

// The backward part computes tanh and cosine again, from the layer's input and weight. The cosine
// was there for the backward part alone: the forward part computes it no more. The dot that makes
// the layer's result is not repeated.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: %[[Y:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%[[X:.*]], %[[W:.*]]) {alpa.flops = 2112 : i64, alpa.part = "forward"
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: %[[P:.*]] = stablehlo.dot_general
// CHECK-NEXT: mpmd.return %[[P]] : tensor<8x8xf32>
// CHECK: %[[G:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%[[X]], %[[W]], %{{.*}}) {alpa.flops = 2240 : i64, alpa.part = "backward", alpa.remat = array<i64: 0>
// CHECK-SAME: (%[[U:.*]]: tensor<8x8xf32>, %[[V:.*]]: tensor<8x8xf32>, %[[E:.*]]: tensor<8x8xf32>)
// CHECK-NEXT: %[[D:.*]] = stablehlo.dot_general %[[U]], %[[V]]
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[D]]
// CHECK-NEXT: %[[C:.*]] = stablehlo.cosine %[[T]]
// CHECK-NEXT: %[[M:.*]] = stablehlo.multiply %[[E]], %[[C]]
// CHECK-NEXT: %[[N:.*]] = stablehlo.dot_general %[[T]], %[[M]]
// CHECK-NEXT: mpmd.return %[[N]]
// CHECK: return %[[Y]], %[[G]]
func.func public @residuals(%w: !a, %x: !a, %d: !a) -> (!a, !a) {
  %y, %t, %c = mpmd.named_computation<"layer_0"(0)> (%w, %x) (%v: !a, %u: !a) {
    %0 = stablehlo.dot_general %u, %v, contracting_dims = [1] x [0] : (!a, !a) -> !a
    %1 = stablehlo.tanh %0 : !a
    %2 = stablehlo.cosine %1 : !a
    %3 = stablehlo.dot_general %1, %v, contracting_dims = [1] x [1] : (!a, !a) -> !a
    mpmd.return %3, %1, %2 : !a, !a, !a
  } : (!a, !a) -> (!a, !a, !a)
  %g = mpmd.named_computation<"layer_0"(1)> (%t, %c, %d) (%r: !a, %s: !a, %e: !a) {
    %0 = stablehlo.multiply %e, %s : !a
    %1 = stablehlo.dot_general %r, %0, contracting_dims = [0] x [0] : (!a, !a) -> !a
    mpmd.return %1 : !a
  } : (!a, !a, !a) -> !a
  return %y, %g : !a, !a
}

// -----

// Two layers of one stage. What layer_0 hands to layer_1 is kept: both backward parts read it and
// begin from it, and layer_0's tanh is not repeated. One fragment holds both parts.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: %[[F:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0", "layer_1"], stage=0>
// CHECK: %[[G:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)], stage=0> (%[[F]]#0, %{{.*}}) {alpa.flops = 192 : i64, alpa.part = "backward", alpa.remat = array<i64: 1>
// CHECK-SAME: (%[[H:.*]]: tensor<8x8xf32>, %[[D:.*]]: tensor<8x8xf32>)
// CHECK-NEXT: %[[E:.*]] = stablehlo.exponential %[[H]]
// CHECK-NEXT: %[[M:.*]] = stablehlo.multiply %[[D]], %[[E]]
// CHECK-NEXT: %[[A:.*]] = stablehlo.add %[[M]], %[[H]]
// CHECK-NEXT: %[[N:.*]] = stablehlo.multiply %[[A]], %[[H]]
// CHECK-NEXT: mpmd.return %[[N]]
func.func public @own_results(%x: !a, %d: !a) -> (!a, !a) {
  %h = mpmd.named_computation<"layer_0"(0)> (%x) (%u: !a) {
    %0 = stablehlo.tanh %u : !a
    mpmd.return %0 : !a
  } : (!a) -> !a
  %y, %e = mpmd.named_computation<"layer_1"(0)> (%h) (%u: !a) {
    %0 = stablehlo.exponential %u : !a
    %1 = stablehlo.sine %0 : !a
    mpmd.return %1, %0 : !a, !a
  } : (!a) -> (!a, !a)
  %g = mpmd.named_computation<"layer_1"(1)> (%e, %h, %d) (%r: !a, %u: !a, %e1: !a) {
    %0 = stablehlo.multiply %e1, %r : !a
    %1 = stablehlo.add %0, %u : !a
    mpmd.return %1 : !a
  } : (!a, !a, !a) -> !a
  %f = mpmd.named_computation<"layer_0"(1)> (%h, %g) (%r: !a, %e0: !a) {
    %0 = stablehlo.multiply %e0, %r : !a
    mpmd.return %0 : !a
  } : (!a, !a) -> !a
  return %y, %f : !a, !a
}

// -----

// What must not run twice becomes a result, if it is none: numbers drawn without a key, and a call
// with side effects. A call without them is repeated.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: %[[F:.*]]:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
// CHECK: %[[R:.*]] = stablehlo.rng
// CHECK-NEXT: %[[L:.*]] = stablehlo.custom_call @logged(%[[R]])
// CHECK-NEXT: stablehlo.custom_call @pure(%[[L]])
// CHECK: mpmd.return %{{.*}}, %[[R]], %[[L]]
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%[[F]]#1, %[[F]]#2)
// CHECK-SAME: alpa.remat = array<i64: 0>
// CHECK-SAME: (%[[R:.*]]: tensor<8x8xf32>, %[[L:.*]]: tensor<8x8xf32>)
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[R]]
// CHECK-NEXT: %[[P:.*]] = stablehlo.custom_call @pure(%[[L]])
// CHECK-NEXT: %[[M:.*]] = stablehlo.multiply %[[T]], %[[P]]
// CHECK-NEXT: mpmd.return %[[M]]
func.func public @not_twice(%x: !a) -> (!a, !a) {
  %y, %r, %t = mpmd.named_computation<"layer_0"(0)> (%x) (%u: !a) {
    %shape = stablehlo.constant dense<8> : tensor<2xi64>
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %one = stablehlo.constant dense<1.0> : tensor<f32>
    %0 = stablehlo.rng %zero, %one, %shape, distribution = UNIFORM
      : (tensor<f32>, tensor<f32>, tensor<2xi64>) -> !a
    %1 = stablehlo.custom_call @logged(%0) {has_side_effect = true, sdy.sharding_rule =
      #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=8}, custom>} : (!a) -> !a
    %2 = stablehlo.custom_call @pure(%1) : (!a) -> !a
    %3 = stablehlo.tanh %0 : !a
    %4 = stablehlo.add %2, %u : !a
    %5 = stablehlo.add %4, %3 : !a
    mpmd.return %5, %2, %3 : !a, !a, !a
  } : (!a) -> (!a, !a, !a)
  %g = mpmd.named_computation<"layer_0"(1)> (%r, %t) (%a: !a, %b: !a) {
    %0 = stablehlo.multiply %b, %a : !a
    mpmd.return %0 : !a
  } : (!a, !a) -> !a
  return %y, %g : !a, !a
}

// -----

// A forward part that exists for its backward part alone would be left with nothing to return.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
// CHECK: stablehlo.tanh
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
// CHECK-NOT: alpa.remat
// CHECK-NOT: stablehlo.tanh
func.func public @for_the_backward_alone(%x: !a) -> !a {
  %t = mpmd.named_computation<"layer_0"(0)> (%x) (%u: !a) {
    %0 = stablehlo.tanh %u : !a
    mpmd.return %0 : !a
  } : (!a) -> !a
  %g = mpmd.named_computation<"layer_0"(1)> (%t) (%r: !a) {
    %0 = stablehlo.negate %r : !a
    mpmd.return %0 : !a
  } : (!a) -> !a
  return %g : !a
}

// -----

// A loop is repeated as a whole, with what its regions read from outside of it.
!a = tensor<8x8xf32>
// CHECK-LABEL: module {
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%{{.*}}, %{{.*}}) {{.*}}alpa.remat
// CHECK-SAME: (%[[X:.*]]: tensor<8x8xf32>, %[[W:.*]]: tensor<8x8xf32>)
// CHECK: stablehlo.while
// CHECK: stablehlo.dot_general %{{.*}}, %[[W]]
// CHECK: stablehlo.negate
func.func public @loop(%x: !a, %w: !a) -> (!a, !a) {
  %y, %t = mpmd.named_computation<"layer_0"(0)> (%x, %w) (%u: !a, %v: !a) {
    %zero = stablehlo.constant dense<0> : tensor<i32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %four = stablehlo.constant dense<4> : tensor<i32>
    %0:2 = stablehlo.while(%i = %zero, %h = %u) : tensor<i32>, !a cond {
      %2 = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %2 : tensor<i1>
    } do {
      %2 = stablehlo.add %i, %one : tensor<i32>
      %3 = stablehlo.dot_general %h, %v, contracting_dims = [1] x [0] : (!a, !a) -> !a
      stablehlo.return %2, %3 : tensor<i32>, !a
    }
    %1 = stablehlo.tanh %0#1 : !a
    mpmd.return %1, %0#1 : !a, !a
  } : (!a, !a) -> (!a, !a)
  %g = mpmd.named_computation<"layer_0"(1)> (%t) (%r: !a) {
    %0 = stablehlo.negate %r : !a
    mpmd.return %0 : !a
  } : (!a) -> !a
  return %y, %g : !a, !a
}

// -----

// A layer of two blocks, wide inside and narrow between, is computed again block by block. The
// forward part also returns what crosses between them. A barrier makes the first block wait for the
// second one's backward ops.
!n = tensor<8x8xf32>
!w = tensor<8x64xf32>
!v = tensor<64x8xf32>
// CHECK-LABEL: module {
// CHECK: %[[F:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%[[X:.*]], %[[W:.*]], %[[V:.*]]) {
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
// CHECK-SAME: alpa.remat = array<i64: 0>
// CHECK-SAME: (%[[D:.*]]: tensor<8x8xf32>, %[[A:.*]]: tensor<64x8xf32>, %[[H:.*]]: tensor<8x8xf32>, %[[B:.*]]: tensor<8x64xf32>, %[[I:.*]]: tensor<8x8xf32>)
// CHECK-NEXT: %[[E:.*]] = stablehlo.dot_general %[[D]], %[[A]]
// CHECK-NEXT: %[[P:.*]] = stablehlo.dot_general %[[H]], %[[B]]
// CHECK-NEXT: %[[Q:.*]] = stablehlo.cosine %[[P]]
// CHECK-NEXT: %[[R:.*]] = stablehlo.multiply %[[E]], %[[Q]]
// CHECK-NEXT: %[[G:.*]] = stablehlo.dot_general %[[R]], %[[B]]
// CHECK-NEXT: %[[J:.*]] = stablehlo.dot_general %[[G]], %[[A]]
// CHECK-NEXT: %[[K:.*]]:2 = stablehlo.optimization_barrier %[[I]], %[[J]]
// CHECK-NEXT: %[[L:.*]] = stablehlo.dot_general %[[K]]#0, %[[B]]
// CHECK-NEXT: %[[M:.*]] = stablehlo.cosine %[[L]]
// CHECK-NEXT: %[[N:.*]] = stablehlo.multiply %[[K]]#1, %[[M]]
// CHECK-NEXT: stablehlo.dot_general %[[N]], %[[B]]
func.func public @blocks(
    %x: !n {alpa.role = "batch", alpa.batch_dim = 0 : i64},
    %w: !w {alpa.role = "state"}, %v: !v {alpa.role = "state"}, %d: !n) -> (!n, !n) {
  %y, %c0, %c1 = mpmd.named_computation<"layer_0"(0)> (%x, %w, %v) (%u: !n, %a: !w, %b: !v) {
    %0 = stablehlo.dot_general %u, %a, contracting_dims = [1] x [0] : (!n, !w) -> !w
    %1 = stablehlo.sine %0 : !w
    %2 = stablehlo.cosine %0 : !w
    %3 = stablehlo.dot_general %1, %b, contracting_dims = [1] x [0] : (!w, !v) -> !n
    %4 = stablehlo.dot_general %3, %a, contracting_dims = [1] x [0] : (!n, !w) -> !w
    %5 = stablehlo.sine %4 : !w
    %6 = stablehlo.cosine %4 : !w
    %7 = stablehlo.dot_general %5, %b, contracting_dims = [1] x [0] : (!w, !v) -> !n
    mpmd.return %7, %2, %6 : !n, !w, !w
  } : (!n, !w, !v) -> (!n, !w, !w)
  %g = mpmd.named_computation<"layer_0"(1)> (%d, %c0, %c1, %w, %v)
      (%e: !n, %r0: !w, %r1: !w, %a: !w, %b: !v) {
    %0 = stablehlo.dot_general %e, %b, contracting_dims = [1] x [1] : (!n, !v) -> !w
    %1 = stablehlo.multiply %0, %r1 : !w
    %2 = stablehlo.dot_general %1, %a, contracting_dims = [1] x [1] : (!w, !w) -> !n
    %3 = stablehlo.dot_general %2, %b, contracting_dims = [1] x [1] : (!n, !v) -> !w
    %4 = stablehlo.multiply %3, %r0 : !w
    %5 = stablehlo.dot_general %4, %a, contracting_dims = [1] x [1] : (!w, !w) -> !n
    mpmd.return %5 : !n
  } : (!n, !w, !w, !w, !v) -> !n
  return %y, %g : !n, !n
}

// -----

// The sort has a result that the forward part returns, and one that only the backward part reads. It
// is computed again, so that the first block's barrier takes the layer's input, not what it sorts.
!n = tensor<8x8xf32>
!w = tensor<8x64xf32>
!v = tensor<64x8xf32>
// CHECK-LABEL: module {
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0>
// CHECK: %[[J:.*]] = stablehlo.dot_general
// CHECK: %[[K:.*]]:2 = stablehlo.optimization_barrier %[[I:.*]], %{{.*}}
// CHECK-NEXT: %[[S:.*]]:2 = "stablehlo.sort"(%[[K]]#0, %[[K]]#0)
// CHECK: stablehlo.dot_general %[[S]]#0
// CHECK: stablehlo.multiply %{{.*}}, %[[S]]#1
func.func public @one_result_is_kept(
    %x: !n {alpa.role = "batch", alpa.batch_dim = 0 : i64},
    %w: !w {alpa.role = "state"}, %v: !v {alpa.role = "state"}, %d: !n) -> (!n, !n, !n) {
  %y, %k, %c0, %c1, %t = mpmd.named_computation<"layer_0"(0)> (%x, %w, %v) (%u: !n, %a: !w, %b: !v) {
    %s:2 = "stablehlo.sort"(%u, %u) <{dimension = 1 : i64}> ({
    ^bb0(%p: tensor<f32>, %q: tensor<f32>, %r: tensor<f32>, %z: tensor<f32>):
      %c = stablehlo.compare LT, %p, %q : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    }) : (!n, !n) -> (!n, !n)
    %0 = stablehlo.dot_general %s#0, %a, contracting_dims = [1] x [0] : (!n, !w) -> !w
    %1 = stablehlo.sine %0 : !w
    %2 = stablehlo.cosine %0 : !w
    %3 = stablehlo.dot_general %1, %b, contracting_dims = [1] x [0] : (!w, !v) -> !n
    %4 = stablehlo.dot_general %3, %a, contracting_dims = [1] x [0] : (!n, !w) -> !w
    %5 = stablehlo.sine %4 : !w
    %6 = stablehlo.cosine %4 : !w
    %7 = stablehlo.dot_general %5, %b, contracting_dims = [1] x [0] : (!w, !v) -> !n
    mpmd.return %7, %s#0, %2, %6, %s#1 : !n, !n, !w, !w, !n
  } : (!n, !w, !v) -> (!n, !n, !w, !w, !n)
  %g = mpmd.named_computation<"layer_0"(1)> (%d, %c0, %c1, %t, %w, %v)
      (%e: !n, %r0: !w, %r1: !w, %m: !n, %a: !w, %b: !v) {
    %0 = stablehlo.dot_general %e, %b, contracting_dims = [1] x [1] : (!n, !v) -> !w
    %1 = stablehlo.multiply %0, %r1 : !w
    %2 = stablehlo.dot_general %1, %a, contracting_dims = [1] x [1] : (!w, !w) -> !n
    %3 = stablehlo.dot_general %2, %b, contracting_dims = [1] x [1] : (!n, !v) -> !w
    %4 = stablehlo.multiply %3, %r0 : !w
    %5 = stablehlo.dot_general %4, %a, contracting_dims = [1] x [1] : (!w, !w) -> !n
    %6 = stablehlo.multiply %5, %m : !n
    mpmd.return %6 : !n
  } : (!n, !w, !w, !n, !w, !v) -> !n
  return %y, %k, %g : !n, !n, !n
}
