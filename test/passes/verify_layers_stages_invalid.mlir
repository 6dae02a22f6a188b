// RUN: alpa-opt %s --pipeline=verify-layers --split-input-file --verify-diagnostics

// A later stage is read by an earlier one.
!a0 = !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>>
!a1 = !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>>
#topology = #mpmd.topology<<"mesh_0" : <["axis0"=1]>>, <"mesh_1" : <["axis0"=1]>>>
func.func public @main(%x: !a1 {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!a0 {alpa.result = "concat:0"}) attributes {topology = #topology,
    alpa.meshes = [{devices = array<i64: 0>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_0"}, {devices = array<i64: 1>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_1"}]} {
  // expected-note @+1 {{made here, by the forward of layer_1}}
  %0 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%x) {alpa.part = "forward"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a1) -> !a1
  %1 = mpmd.transfer %0 : (!a1) -> !a0
  // expected-error @+1 {{operand 0 of the forward of layer_0 on stage 0 is made on stage 1: forward values flow from lower to higher ones}}
  %2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%1) {alpa.part = "forward"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a0) -> !a0
  return %2 : !a0
}

// -----

// The gradient of a parameter that both stages read goes through a transfer into a sum.
!a0 = !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>>
!a1 = !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>>
#topology = #mpmd.topology<<"mesh_0" : <["axis0"=1]>>, <"mesh_1" : <["axis0"=1]>>>
func.func public @main(%x: !a0 {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!a0 {alpa.result = "last"}) attributes {topology = #topology,
    alpa.meshes = [{devices = array<i64: 0>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_0"}, {devices = array<i64: 1>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_1"}]} {
  %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a0) -> !a0
  %1 = mpmd.transfer %0 : (!a0) -> !a1
  %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%1) {alpa.part = "forward"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a1) -> !a1
  // expected-note @+1 {{the other part is made here}}
  %3 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1> (%2) {alpa.part = "backward"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a1) -> !a1
  %4 = mpmd.transfer %3 : (!a1) -> !a0
  // expected-error @+1 {{result 0 of the backward of layer_0(1) adds to a gradient what the backward of layer_1(1) made of it}}
  %5 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%0, %4) {alpa.part = "backward"} (%a: tensor<4x8xf32>, %b: tensor<4x8xf32>) {
    %7 = stablehlo.tanh %a : tensor<4x8xf32>
    %8 = stablehlo.add %7, %b : tensor<4x8xf32>
    mpmd.return %8 : tensor<4x8xf32>
  } : (!a0, !a0) -> !a0
  %6 = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%5) {alpa.part = "update"} (%a: tensor<4x8xf32>) {
    mpmd.return %a : tensor<4x8xf32>
  } : (!a0) -> !a0
  return %6 : !a0
}
