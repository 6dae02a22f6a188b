// RUN: alpa-opt %s --split-input-file --pipeline='place-gradient-reductions,place-gradient-reductions' | filecheck %s

// A sum over samples may stay open until the update; one constraint stands before its first reader, also when the pass runs twice.
// CHECK-LABEL: origin=["update_0"]
// CHECK-SAME: (%[[W:[a-z0-9]+]]: tensor<4x4xf32>, %[[G:[a-z0-9]+]]: tensor<4x4xf32>)
// CHECK-NEXT: %[[N:.*]] = stablehlo.negate %[[W]]
// CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[G]] <@mesh_0, [{?}, {?}]>
// CHECK-NEXT: stablehlo.multiply %[[C]], %[[C]]
// CHECK-NEXT: stablehlo.add %[[N]], %[[C]]
!m_x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!m_w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
sdy.mesh @mesh_0 = <["axis0"=2]>
func.func public @sum(%w: !m_w {alpa.role = "state"}, %x: !m_x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!m_w {alpa.result = "state:0"})
    attributes {topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
                alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
                alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 4 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
  %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) {alpa.part = "backward"} (%a: tensor<8x4xf32>) {
    %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!m_x) -> !m_w
  %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xf32>, %b: tensor<4x4xf32>) {
    %2 = stablehlo.negate %a : tensor<4x4xf32>
    %3 = stablehlo.multiply %b, %b : tensor<4x4xf32>
    %4 = stablehlo.add %2, %b : tensor<4x4xf32>
    %5 = stablehlo.add %3, %4 : tensor<4x4xf32>
    mpmd.return %5 : tensor<4x4xf32>
  } : (!m_w, !m_w) -> !m_w
  return %1 : !m_w
}

// -----

// The program returns the gradient of each micro-batch, too: nothing is placed.
// CHECK-LABEL: func.func public @returned
// CHECK-NOT: sdy.sharding_constraint
!m_x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!m_w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
sdy.mesh @mesh_0 = <["axis0"=2]>
func.func public @returned(%w: !m_w {alpa.role = "state"}, %x: !m_x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!m_w {alpa.result = "state:0"}, !m_w {alpa.result = "mean"})
    attributes {topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
                alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
                alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 4 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
  %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) {alpa.part = "backward"} (%a: tensor<8x4xf32>) {
    %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!m_x) -> !m_w
  %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xf32>, %b: tensor<4x4xf32>) {
    %2 = stablehlo.add %a, %b : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!m_w, !m_w) -> !m_w
  return %1, %0 : !m_w, !m_w
}

// -----

// With one micro-batch a gradient is reduced where it is made.
// CHECK-LABEL: func.func public @one_micro_batch
// CHECK-NOT: sdy.sharding_constraint
!m_x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
!m_w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
sdy.mesh @mesh_0 = <["axis0"=2]>
func.func public @one_micro_batch(%w: !m_w {alpa.role = "state"}, %x: !m_x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!m_w {alpa.result = "state:0"})
    attributes {topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
                alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>, logical_shape = array<i64: 2>}],
                alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 1 : i64, schedule = "1f1b", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
  %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) {alpa.part = "backward"} (%a: tensor<8x4xf32>) {
    %2 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0] : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!m_x) -> !m_w
  %1 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %0) {alpa.part = "update"} (%a: tensor<4x4xf32>, %b: tensor<4x4xf32>) {
    %2 = stablehlo.add %a, %b : tensor<4x4xf32>
    mpmd.return %2 : tensor<4x4xf32>
  } : (!m_w, !m_w) -> !m_w
  return %1 : !m_w
}
