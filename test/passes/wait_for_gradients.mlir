// RUN: alpa-opt %s --split-input-file --pipeline='wait-for-gradients' | filecheck %s

// The gradient of a fragment without updates is returned. It passes the barrier that follows it, so
// that the activation of which it is made can go. A constant does not, and nothing that is read in
// between.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @a_returned_gradient
  func.func public @a_returned_gradient(%x: !x, %d: !x) -> (!x, !x) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>, logical_shape = array<i64: 1>}],
      alpa.plan = {cluster = "cpu:1x1", num_micro_batches = 1 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    // CHECK-NEXT: %[[F:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)]> (%{{.*}}, %{{.*}}) {alpa.part = "backward"} (%[[A:.*]]: tensor<4x4xf32>, %{{.*}}: tensor<4x4xf32>)
    // CHECK: %[[T:.*]] = stablehlo.cholesky %[[A]]
    // CHECK-NEXT: %[[C:.*]] = stablehlo.dot_general
    // CHECK-NEXT: %[[G:.*]] = stablehlo.dot_general %[[T]]
    // CHECK-NEXT: %[[B:.*]]:3 = stablehlo.optimization_barrier {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>, <@mesh_0, [{}, {}]>, <@mesh_0, [{}, {}]>]>} %[[A]], %[[C]], %[[G]]
    // CHECK-NEXT: %[[U:.*]] = stablehlo.cholesky %[[B]]#0
    // CHECK-NEXT: %[[H:.*]] = stablehlo.dot_general %[[U]], %[[B]]#1
    // CHECK-NEXT: %[[K:.*]] = stablehlo.add %[[H]], %{{.*}} : tensor<4x4xf32>
    // CHECK-NEXT: mpmd.return %[[B]]#2, %[[K]]
    %f:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)]> (%x, %d) {alpa.part = "backward"} (%a: tensor<4x4xf32>, %e: tensor<4x4xf32>) {
      %one = stablehlo.constant dense<1.0> : tensor<4x4xf32>
      %t = stablehlo.cholesky %a : tensor<4x4xf32>
      %c = stablehlo.dot_general %e, %t, contracting_dims = [1] x [1] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %g = stablehlo.dot_general %t, %e, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %b:2 = stablehlo.optimization_barrier {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>, <@mesh_0, [{}, {}]>]>} %a, %c : tensor<4x4xf32>, tensor<4x4xf32>
      %u = stablehlo.cholesky %b#0 : tensor<4x4xf32>
      %h = stablehlo.dot_general %u, %b#1, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %k = stablehlo.add %h, %one : tensor<4x4xf32>
      mpmd.return %g, %k : tensor<4x4xf32>, tensor<4x4xf32>
    } : (!x, !x) -> (!x, !x)
    return %f#0, %f#1 : !x, !x
  }
}

// -----

// Arguments stay anyway: waiting for %g gains nothing.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @nothing_gained
  func.func public @nothing_gained(%x: !x, %d: !x) -> (!x, !x) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>, logical_shape = array<i64: 1>}],
      alpa.plan = {cluster = "cpu:1x1", num_micro_batches = 1 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    // CHECK: stablehlo.optimization_barrier %{{.*}}, %{{.*}} : tensor<4x4xf32>, tensor<4x4xf32>
    %f:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)]> (%x, %d) {alpa.part = "backward"} (%a: tensor<4x4xf32>, %e: tensor<4x4xf32>) {
      %g = stablehlo.dot_general %a, %e, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %b:2 = stablehlo.optimization_barrier %a, %e : tensor<4x4xf32>, tensor<4x4xf32>
      %h = stablehlo.dot_general %b#0, %b#1, contracting_dims = [0] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      mpmd.return %g, %h : tensor<4x4xf32>, tensor<4x4xf32>
    } : (!x, !x) -> (!x, !x)
    return %f#0, %f#1 : !x, !x
  }
}
