// RUN: alpa-opt %s --pipeline='layer-cluster{num-layers=2}' --split-input-file | filecheck %s

// Inference: two layers, the activation between them, and nothing else.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: func.func public @inference
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {alpa.input = 0 : i64}, %[[W1:.*]]: tensor<8x8xf32> {alpa.input = 1 : i64}, %[[X:.*]]: tensor<4x8xf32> {alpa.input = 2 : i64})
// CHECK-SAME: -> (tensor<4x8xf32> {alpa.output = 0 : i64})
// CHECK-NEXT: %[[L0:.*]] = mpmd.named_computation<"layer_0"> (%[[X]], %[[W0]]) {alpa.flops = 544 : i64}
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: mpmd.return
// CHECK: %[[L1:.*]] = mpmd.named_computation<"layer_1"> (%[[L0]], %[[W1]]) {alpa.flops = 544 : i64}
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.tanh
// CHECK-NEXT: mpmd.return
// CHECK-NOT: named_computation
// CHECK: return %[[L1]]
func.func public @inference(%w0: !p, %w1: !p, %x: !a) -> !a {
  %0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.tanh %0 : !a
  %2 = stablehlo.dot_general %1, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %3 = stablehlo.tanh %2 : !a
  return %3 : !a
}

// -----

// Shardings that the program gives parameters stand in each layer that reads them.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: module @constrained_parameters
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0"> (%{{.*}}, %{{.*}}) {{.*}} (%[[W0:.*]]: tensor<8x8xf32>, %{{.*}}: tensor<4x8xf32>)
// CHECK-NEXT: sdy.sharding_constraint %[[W0]] <@m, [{"a"}, {}]>
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"layer_1"> (%{{.*}}, %[[L0]]) {{.*}} (%[[W1:.*]]: tensor<8x8xf32>, %{{.*}}: tensor<4x8xf32>)
// CHECK-NEXT: sdy.sharding_constraint %[[W1]] <@m, [{}, {"a"}]>
// CHECK-NEXT: stablehlo.dot_general
module @constrained_parameters {
  sdy.mesh @m = <["a"=2]>
  func.func public @main(%w0: !p, %w1: !p, %x: !a) -> !a {
    %0 = sdy.sharding_constraint %w0 <@m, [{"a"}, {}]> : !p
    %1 = sdy.sharding_constraint %w1 <@m, [{}, {"a"}]> : !p
    %2 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0] : (!a, !p) -> !a
    %3 = stablehlo.dot_general %2, %1, contracting_dims = [1] x [0] : (!a, !p) -> !a
    return %3 : !a
  }
}

// -----

// A loop is one op, weighed by its trips: four in it, four after it.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
// CHECK-LABEL: func.func public @a_loop_is_one_op
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0"> (%{{.*}}, %{{.*}}) {alpa.flops = 2052 : i64}
// CHECK: stablehlo.while
// CHECK: mpmd.named_computation<"layer_1"> (%[[L0]], %{{.*}}) {alpa.flops = 2048 : i64}
// CHECK-COUNT-4: stablehlo.dot_general
// CHECK-NOT: stablehlo.while
func.func public @a_loop_is_one_op(%w: !p, %x: !a) -> !a {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %four = stablehlo.constant dense<4> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, !a
    cond {
      %1 = stablehlo.compare LT, %i, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %1 : tensor<i1>
    } do {
      %1 = stablehlo.dot_general %v, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
      %2 = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %2, %1 : tensor<i32>, !a
    }
  %3 = stablehlo.dot_general %0#1, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %4 = stablehlo.dot_general %3, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %5 = stablehlo.dot_general %4, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %6 = stablehlo.dot_general %5, %w, contracting_dims = [1] x [0] : (!a, !p) -> !a
  return %6 : !a
}

// -----

// A training step: the donated arguments are state, the other one is the batch. Each layer has a
// backward, which returns its gradient, and an update.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @sgd
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 0 : i32}, %[[W1:.*]]: tensor<8x8xf32> {alpa.input = 1 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32}, %[[X:.*]]: tensor<4x8xf32> {alpa.batch_dim = 0 : i64, alpa.input = 2 : i64, alpa.role = "batch"})
// CHECK-SAME: -> (tensor<8x8xf32> {alpa.output = 0 : i64, alpa.result = "state:0"}, tensor<8x8xf32> {alpa.output = 1 : i64, alpa.result = "state:1"}, tensor<f32> {alpa.output = 2 : i64, alpa.result = "mean"})
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0"> (%[[X]], %[[W0]])
// CHECK: %[[L1:.*]]:2 = mpmd.named_computation<"layer_1"> (%[[L0]], %[[W1]])
// CHECK: %[[B1:.*]]:2 = mpmd.named_computation<"layer_1"(1)> (%[[L1]]#0, %[[L0]], %[[W1]])
// CHECK-NEXT: %[[DO:.*]] = stablehlo.add
// CHECK-NEXT: %[[G1:.*]] = stablehlo.dot_general %{{.*}}, %[[DO]], contracting_dims = [0] x [0]
// CHECK: mpmd.return %[[G1]], 
// CHECK: %[[B0:.*]] = mpmd.named_computation<"layer_0"(1)> (%[[X]], %[[B1]]#1)
// CHECK-NEXT: stablehlo.dot_general %{{.*}}, %{{.*}}, contracting_dims = [0] x [0]
// CHECK-NEXT: mpmd.return
// CHECK: %[[U0:.*]] = mpmd.named_computation<"update_0"> (%[[B0]], %[[W0]])
// CHECK: %[[U1:.*]] = mpmd.named_computation<"update_1"> (%[[B1]]#0, %[[W1]])
// CHECK-NOT: named_computation
// CHECK: return %[[U0]], %[[U1]], %[[L1]]#1
func.func public @sgd(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// Without donation, a new state is the one of its type that its update reads.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @state_by_data_flow
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {alpa.input = 0 : i64, alpa.role = "state"}, %[[W1:.*]]: tensor<8x8xf32> {alpa.input = 1 : i64, alpa.role = "state"}, %[[X:.*]]: tensor<4x8xf32> {alpa.batch_dim = 0 : i64, alpa.input = 2 : i64, alpa.role = "batch"})
// CHECK-SAME: -> (tensor<8x8xf32> {alpa.output = 0 : i64, alpa.result = "state:0"}, tensor<8x8xf32> {alpa.output = 1 : i64, alpa.result = "state:1"}, tensor<f32> {alpa.output = 2 : i64, alpa.result = "mean"})
// CHECK: mpmd.named_computation<"update_0"> (%{{.*}}, %[[W0]])
// CHECK: mpmd.named_computation<"update_1"> (%{{.*}}, %[[W1]])
func.func public @state_by_data_flow(%w0: !p, %w1: !p, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// Roles that are given stand: results in another order than the state, and a loss that is a sum.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @given_roles
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {alpa.input = 0 : i64, alpa.role = "state"}, %[[W1:.*]]: tensor<8x8xf32> {alpa.input = 1 : i64, alpa.role = "state"}, %[[X:.*]]: tensor<4x8xf32> {alpa.batch_dim = 1 : i64, alpa.input = 2 : i64, alpa.role = "batch"})
// CHECK-SAME: -> (tensor<f32> {alpa.output = 0 : i64, alpa.result = "sum"}, tensor<8x8xf32> {alpa.output = 1 : i64, alpa.result = "state:1"}, tensor<8x8xf32> {alpa.output = 2 : i64, alpa.result = "state:0"})
// CHECK: %[[U0:.*]] = mpmd.named_computation<"update_0"> (%{{.*}}, %[[W0]])
// CHECK: %[[U1:.*]] = mpmd.named_computation<"update_1"> (%{{.*}}, %[[W1]])
// CHECK: return %{{.*}}, %[[U1]], %[[U0]]
func.func public @given_roles(%w0: !p {alpa.role = "state"}, %w1: !p {alpa.role = "state"}, %x: !a {alpa.role = "batch", alpa.batch_dim = 1 : i64})
    -> (!s {alpa.result = "sum"}, !p {alpa.result = "state:1"}, !p {alpa.result = "state:0"}) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %loss, %n1, %n0 : !s, !p, !p
}

// -----

// `cosine(%t)` is made of forward values alone, and read by layer 1: it is computed there, where
// %t arrives anyway, not sent.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @residual
// CHECK: mpmd.named_computation<"layer_0"> 
// CHECK-NOT: stablehlo.cosine
// CHECK: mpmd.named_computation<"layer_1"(1)>
// CHECK: stablehlo.cosine
// CHECK: mpmd.named_computation<"layer_0"(1)>
func.func public @residual(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// Both layers use one parameter: each returns its gradient, and the update of the first adds them.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @tied_parameter
// CHECK: %[[B1:.*]]:2 = mpmd.named_computation<"layer_1"(1)>
// CHECK: %[[B0:.*]] = mpmd.named_computation<"layer_0"(1)>
// CHECK: %[[U:.*]] = mpmd.named_computation<"update_0"> (%[[B0]], %[[B1]]#0, %{{.*}}) {{.*}} (%[[P:.*]]: tensor<8x8xf32>, %[[Q:.*]]: tensor<8x8xf32>, %{{.*}}: tensor<8x8xf32>)
// CHECK: stablehlo.add %[[P]], %[[Q]]
// CHECK-NOT: named_computation
// CHECK: return %[[U]]
func.func public @tied_parameter(%w0: !p {tf.aliasing_output = 0 : i32}, %x: !a)
    -> (!p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w0, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %g = stablehlo.add %g0, %g1 : !p
  %u = stablehlo.multiply %g, %rate : !p
  %n = stablehlo.subtract %w0, %u : !p
  return %n, %loss : !p, !s
}

// -----

// A marker behind the sum of a shared parameter's gradients does not make it a backward part.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @tied_parameter_with_marker
// CHECK: %[[B1:.*]]:2 = mpmd.named_computation<"layer_1"(1)>
// CHECK: %[[B0:.*]] = mpmd.named_computation<"layer_0"(1)>
// CHECK: %[[U:.*]] = mpmd.named_computation<"update_0"> (%[[B0]], %[[B1]]#0, %{{.*}}) {{.*}} (%[[P:.*]]: tensor<8x8xf32>, %[[Q:.*]]: tensor<8x8xf32>, %{{.*}}: tensor<8x8xf32>)
// CHECK: stablehlo.add %[[P]], %[[Q]]
// CHECK-NOT: named_computation
// CHECK: return %[[U]]
func.func public @tied_parameter_with_marker(%w0: !p {tf.aliasing_output = 0 : i32}, %x: !a)
    -> (!p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w0, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %g = stablehlo.add %g0, %g1 : !p
  %m = stablehlo.custom_call @alpa.gradient(%g) : (!p) -> !p
  %u = stablehlo.multiply %m, %rate : !p
  %n = stablehlo.subtract %w0, %u : !p
  return %n, %loss : !p, !s
}

// -----

// Three levels of updates: each layer adds up its squares, one computation joins the sums, and each
// layer is scaled. Scalars travel: a broadcast that grows is copied to where it is read.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @clipping_by_global_norm
// CHECK: %[[S0:.*]] = mpmd.named_computation<"update_0"> (%[[G0:.*]]) {{.*}} (%{{.*}}: tensor<8x8xf32>) {
// CHECK: -> tensor<f32>
// CHECK: %[[S1:.*]] = mpmd.named_computation<"update_1"> (%[[G1:.*]]) {{.*}} (%{{.*}}: tensor<8x8xf32>) {
// CHECK: -> tensor<f32>
// CHECK: %[[N:.*]] = mpmd.named_computation<"update_global"> (%[[S0]], %[[S1]]) {{.*}} (%{{.*}}: tensor<f32>, %{{.*}}: tensor<f32>)
// CHECK-NEXT: stablehlo.add
// CHECK-NEXT: stablehlo.rsqrt
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"update_0"> (%[[N]], %[[G0]], %{{.*}})
// CHECK-NEXT: stablehlo.broadcast_in_dim
// CHECK: mpmd.named_computation<"update_1"> (%[[N]], %[[G1]], %{{.*}})
// CHECK-NEXT: stablehlo.broadcast_in_dim
func.func public @clipping_by_global_norm(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %q0 = stablehlo.multiply %g0, %g0 : !p
  %s0 = stablehlo.reduce(%q0 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!p, !s) -> !s
  %q1 = stablehlo.multiply %g1, %g1 : !p
  %s1 = stablehlo.reduce(%q1 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!p, !s) -> !s
  %s = stablehlo.add %s0, %s1 : !s
  %norm = stablehlo.rsqrt %s : !s
  %scale = stablehlo.broadcast_in_dim %norm, dims = [] : (!s) -> !p
  %u0 = stablehlo.multiply %g0, %scale : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %scale : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// The norm of the gradients belongs to the update though it is returned, a second metric to the
// forward part though the gradients need it not.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @metrics
// CHECK: mpmd.named_computation<"layer_1"> 
// CHECK: stablehlo.maximum
// CHECK: mpmd.return
// CHECK: mpmd.named_computation<"layer_1"(1)>
// CHECK: mpmd.named_computation<"update_1">
// CHECK: %[[N:.*]] = mpmd.named_computation<"update_global">
// CHECK: return %[[N]], %{{.*}}, %{{.*}}, %{{.*}}, %{{.*}}
func.func public @metrics(%w0: !p {tf.aliasing_output = 1 : i32}, %w1: !p {tf.aliasing_output = 2 : i32}, %x: !a)
    -> (!s, !p, !p, !s, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %largest = stablehlo.reduce(%o init: %zero) applies stablehlo.maximum across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %q0 = stablehlo.multiply %g0, %g0 : !p
  %s0 = stablehlo.reduce(%q0 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!p, !s) -> !s
  %q1 = stablehlo.multiply %g1, %g1 : !p
  %s1 = stablehlo.reduce(%q1 init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!p, !s) -> !s
  %s = stablehlo.add %s0, %s1 : !s
  %norm = stablehlo.rsqrt %s : !s
  %scale = stablehlo.broadcast_in_dim %norm, dims = [] : (!s) -> !p
  %u0 = stablehlo.multiply %g0, %scale : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %scale : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %norm, %n0, %n1, %largest, %loss : !s, !p, !p, !s, !s
}

// -----

// An early loss does not end the forward part: the later one is in it, too.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @an_early_loss
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {{{.*}}}, %[[W1:.*]]: tensor<8x8xf32> {{{.*}}}, %[[X:.*]]: tensor<4x8xf32>
// CHECK: mpmd.named_computation<"layer_0"> (%[[X]], %[[W0]])
// CHECK: mpmd.named_computation<"layer_1"> (%{{.*}}, %[[W1]])
// CHECK: stablehlo.reduce
// CHECK: mpmd.named_computation<"layer_1"(1)>
// CHECK: mpmd.named_computation<"layer_0"(1)>
// CHECK-NOT: stablehlo.reduce
// CHECK: return %{{.*}}, %{{.*}}, %{{.*}}#{{[0-9]}}, %{{.*}}#{{[0-9]}}
func.func public @an_early_loss(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %early = stablehlo.reduce(%t init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss, %early : !p, !p, !s, !s
}

// -----

// Nothing but the new state is returned: the forward part is what all gradients need.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @no_loss
// CHECK: mpmd.named_computation<"layer_0"> 
// CHECK: %[[G1:.*]]:2 = mpmd.named_computation<"layer_1"(1)>
// CHECK: %[[G0:.*]] = mpmd.named_computation<"layer_0"(1)> (%{{.*}}, %[[G1]]#1)
// CHECK: mpmd.named_computation<"update_0"> (%[[G0]], %{{.*}})
// CHECK: mpmd.named_computation<"update_1"> (%[[G1]]#0, %{{.*}})
func.func public @no_loss(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1 : !p, !p
}

// -----

// The sum over the batch uses no activation, but it shrinks what accumulates: it is backward.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @bias_gradient
// CHECK: mpmd.named_computation<"layer_1"(1)>
// CHECK: %[[GB:.*]] = stablehlo.reduce({{.*}}) applies stablehlo.add across dimensions = [0]
// CHECK: mpmd.return {{.*}}%[[GB]]
// CHECK: mpmd.named_computation<"update_
// CHECK-NOT: stablehlo.reduce
// CHECK: return
func.func public @bias_gradient(%w0: !p {tf.aliasing_output = 0 : i32}, %b: tensor<8xf32> {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, tensor<8xf32>, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %b2 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<8xf32>) -> !a
  %o = stablehlo.add %h, %b2 : !a
  %t = stablehlo.tanh %o : !a
  %loss = stablehlo.reduce(%t init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.cosine %o : !a
  %g0 = stablehlo.dot_general %x, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %gb = stablehlo.reduce(%do init: %zero) applies stablehlo.add across dimensions = [0] : (!a, !s) -> tensor<8xf32>
  %n0 = stablehlo.subtract %w0, %g0 : !p
  %n1 = stablehlo.subtract %b, %gb : tensor<8xf32>
  return %n0, %n1, %loss : !p, tensor<8xf32>, !s
}

// -----

// The gradient of %w0 is made of the batch as it came through a barrier: backward all the same.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @rematerialised_activation
// CHECK-SAME: (%[[W0:.*]]: tensor<8x8xf32> {{{.*}}}, %[[W1:.*]]: tensor<8x8xf32> {{{.*}}}, %[[X:.*]]: tensor<4x8xf32> {alpa.batch_dim
// CHECK: %[[B1:.*]]:2 = mpmd.named_computation<"layer_1"(1)>
// CHECK: %[[B0:.*]] = mpmd.named_computation<"layer_0"(1)> (%[[X]], %[[W0]], %[[B1]]#1)
// CHECK-NEXT: stablehlo.optimization_barrier
// CHECK: stablehlo.dot_general %{{.*}}, %{{.*}}, contracting_dims = [0] x [0]
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"update_0"> (%[[B0]], %[[W0]])
func.func public @rematerialised_activation(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %again:3 = stablehlo.optimization_barrier %x, %w0, %dt : !a, !p, !a
  %h2 = stablehlo.dot_general %again#0, %again#1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %c = stablehlo.cosine %h2 : !a
  %dh = stablehlo.multiply %again#2, %c : !a
  %g0 = stablehlo.dot_general %again#0, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// A constant and its broadcast stand in each layer that reads them; nothing of it crosses.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @constants_are_copied
// CHECK: %[[L0:.*]] = mpmd.named_computation<"layer_0"> (%{{[a-z0-9]+}}, %[[W:[a-z0-9]+]]) {
// CHECK: stablehlo.constant
// CHECK: stablehlo.broadcast_in_dim
// CHECK: mpmd.named_computation<"layer_1"> (%[[L0]], %[[W]])
// CHECK: stablehlo.constant
// CHECK: stablehlo.broadcast_in_dim
func.func public @constants_are_copied(%w0: !p, %x: !a)
    -> (!a) {
  %two = stablehlo.constant dense<2.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %v = stablehlo.broadcast_in_dim %two, dims = [] : (!s) -> !a
  %t = stablehlo.multiply %h, %v : !a
  %o = stablehlo.dot_general %t, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %r = stablehlo.multiply %o, %v : !a
  return %r : !a
}

// -----

// State that is made of the forward pass alone is written by it.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @running_average
// CHECK: %[[L0:.*]]:2 = mpmd.named_computation<"layer_0"> (
// CHECK: stablehlo.reduce
// CHECK: %[[R:.*]] = stablehlo.multiply
// CHECK: mpmd.return %[[R]], %{{.*}}
// CHECK: return %[[L0]]#0, 
func.func public @running_average(%r: tensor<8xf32> {tf.aliasing_output = 0 : i32}, %w0: !p {tf.aliasing_output = 1 : i32}, %w1: !p {tf.aliasing_output = 2 : i32}, %x: !a)
    -> (tensor<8xf32>, !p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %mean = stablehlo.reduce(%h init: %zero) applies stablehlo.add across dimensions = [0] : (!a, !s) -> tensor<8xf32>
  %half = stablehlo.constant dense<0.5> : tensor<8xf32>
  %r0 = stablehlo.add %r, %mean : tensor<8xf32>
  %r1 = stablehlo.multiply %r0, %half : tensor<8xf32>
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %r1, %n0, %n1, %loss : tensor<8xf32>, !p, !p, !s
}

// -----

// The count is the business of no layer; it is computed once and travels as a scalar.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @step_count
// CHECK: %[[K:.*]]:2 = mpmd.named_computation<"update_global"> (%{{.*}}) {{.*}} (%{{.*}}: tensor<i32>) {
// CHECK: stablehlo.add
// CHECK-NEXT: stablehlo.convert
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"update_0"> (%[[K]]#1, %{{.*}}, %{{.*}})
// CHECK-NOT: stablehlo.convert
// CHECK: mpmd.named_computation<"update_1"> (%[[K]]#1, %{{.*}}, %{{.*}})
// CHECK: return %[[K]]#0, 
func.func public @step_count(%k: tensor<i32> {tf.aliasing_output = 0 : i32}, %w0: !p {tf.aliasing_output = 1 : i32}, %w1: !p {tf.aliasing_output = 2 : i32}, %x: !a)
    -> (tensor<i32>, !p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %one = stablehlo.constant dense<1> : tensor<i32>
  %k1 = stablehlo.add %k, %one : tensor<i32>
  %f = stablehlo.convert %k1 : (tensor<i32>) -> !s
  %fb = stablehlo.broadcast_in_dim %f, dims = [] : (!s) -> !p
  %u0 = stablehlo.divide %g0, %fb : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.divide %g1, %fb : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %k1, %n0, %n1, %loss : tensor<i32>, !p, !p, !s
}

// -----

// A marked gradient ends the backward part, though the update uses the batch once more.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @gradient_marker
// CHECK-NOT: alpa.gradient
// CHECK: %[[G0:.*]] = mpmd.named_computation<"layer_0"(1)> (
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"update_0"> ({{.*}}%[[G0]]
// CHECK-NOT: alpa.gradient
// CHECK: return
func.func public @gradient_marker(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %c = stablehlo.cosine %t : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %m0 = stablehlo.custom_call @alpa.gradient(%g0) : (!p) -> !p
  %m1 = stablehlo.custom_call @alpa.gradient(%g1) : (!p) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %m0, %rate : !p
  %u1 = stablehlo.multiply %m1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  %ux = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %uxb = stablehlo.broadcast_in_dim %ux, dims = [] : (!s) -> !p
  %u2 = stablehlo.multiply %u0, %uxb : !p
  %n0 = stablehlo.subtract %w0, %u2 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// layer_0's backward part computes %h again, as soon as a compiler wants. So it gets a barrier: the
// batch waits for the cotangent. layer_1's comes first, and waits for nothing.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!s = tensor<f32>
// CHECK-LABEL: func.func public @computed_again
// CHECK: %[[B1:.*]]:2 = mpmd.named_computation<"layer_1"(1)>
// CHECK-NOT: optimization_barrier
// CHECK: mpmd.named_computation<"layer_0"(1)> (%{{.*}}, %{{.*}}, %[[B1]]#1)
// CHECK-SAME: (%[[X:.*]]: tensor<4x8xf32>, %[[W:.*]]: tensor<8x8xf32>, %[[D:.*]]: tensor<4x8xf32>)
// CHECK-NEXT: %[[L:.*]]:2 = stablehlo.optimization_barrier %[[X]], %[[D]]
// CHECK-NEXT: %[[H:.*]] = stablehlo.dot_general %[[L]]#0, %[[W]]
// CHECK-NEXT: %[[C:.*]] = stablehlo.cosine %[[H]]
// CHECK-NEXT: %[[M:.*]] = stablehlo.multiply %[[L]]#1, %[[C]]
// CHECK-NEXT: stablehlo.dot_general %[[L]]#0, %[[M]]
// CHECK-NEXT: mpmd.return
func.func public @computed_again(%w0: !p {tf.aliasing_output = 0 : i32}, %w1: !p {tf.aliasing_output = 1 : i32}, %x: !a)
    -> (!p, !p, !s) {
  %zero = stablehlo.constant dense<0.0> : !s
  %h = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %t = stablehlo.tanh %h : !a
  %o = stablehlo.dot_general %t, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %e = stablehlo.multiply %o, %o : !a
  %loss = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [0, 1] : (!a, !s) -> !s
  %do = stablehlo.add %o, %o : !a
  %g1 = stablehlo.dot_general %t, %do, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %dt = stablehlo.dot_general %do, %w1, contracting_dims = [1] x [1] : (!a, !p) -> !a
  %h2 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %c = stablehlo.cosine %h2 : !a
  %dh = stablehlo.multiply %dt, %c : !a
  %g0 = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0] : (!a, !a) -> !p
  %rate = stablehlo.constant dense<0.1> : !p
  %u0 = stablehlo.multiply %g0, %rate : !p
  %n0 = stablehlo.subtract %w0, %u0 : !p
  %u1 = stablehlo.multiply %g1, %rate : !p
  %n1 = stablehlo.subtract %w1, %u1 : !p
  return %n0, %n1, %loss : !p, !p, !s
}

// -----

// What a layer computes twice is one op; what two layers compute is in each of them.
!a = tensor<4x8xf32>
!p = tensor<8x8xf32>
!m = tensor<4x8xi1>
// CHECK-LABEL: func.func public @common_subexpressions
// CHECK: mpmd.named_computation<"layer_0">
// CHECK-NEXT: %[[D0:.*]] = stablehlo.dot_general
// CHECK-NEXT: stablehlo.constant dense<0.000000e+00>
// CHECK-NEXT: stablehlo.compare
// CHECK-NEXT: %[[T0:.*]] = stablehlo.tanh %[[D0]]
// CHECK-NEXT: stablehlo.add %[[T0]], %[[T0]]
// CHECK-NEXT: stablehlo.select
// CHECK-NEXT: mpmd.return
// CHECK: mpmd.named_computation<"layer_1">
// CHECK-NEXT: stablehlo.dot_general
// CHECK-NEXT: stablehlo.constant dense<0.000000e+00>
// CHECK-NEXT: stablehlo.maximum
// CHECK-NEXT: mpmd.return
func.func public @common_subexpressions(%w0: !p, %w1: !p, %x: !a) -> !a {
  %0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %1 = stablehlo.constant dense<0.0> : !a
  %2 = stablehlo.compare GT, %0, %1 : (!a, !a) -> !m
  %3 = stablehlo.tanh %0 : !a
  %4 = stablehlo.tanh %0 : !a
  %5 = stablehlo.add %3, %4 : !a
  %6 = stablehlo.constant dense<0.0> : !a
  %7 = stablehlo.select %2, %5, %6 : !m, !a
  %8 = stablehlo.dot_general %7, %w1, contracting_dims = [1] x [0] : (!a, !p) -> !a
  %9 = stablehlo.constant dense<0.0> : !a
  %10 = stablehlo.maximum %8, %9 : !a
  return %10 : !a
}
