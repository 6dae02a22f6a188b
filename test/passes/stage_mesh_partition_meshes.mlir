// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x4 meshes=0-1:2,2-2:1,3-3:1}' --split-input-file | filecheck %s

// Where a state lies decides on which of the given meshes a layer is, and keeps its sharding; a mesh
// that gets no layer stays.
!a = tensor<4x8xf32>
// CHECK-LABEL: module {
// CHECK-NEXT: sdy.mesh @mesh_0 = <["axis0"=2]>
// CHECK-NEXT: sdy.mesh @mesh_1 = <["axis0"=1]>
// CHECK-NEXT: sdy.mesh @mesh_2 = <["axis0"=1]>
// CHECK-NEXT: func.func public @main
// CHECK-SAME: %[[U:[^:]*]]: !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>, sharding=<@mesh_0, [{}, {"axis0"}]>> {alpa.input = 0 : i64},
// CHECK-SAME: %[[V:[^:]*]]: !mpmd.mesh_tensor<"mesh_2", tensor<4x8xf32>, sharding=<@mesh_2, [{}, {}]>> {alpa.input = 1 : i64})
// CHECK-SAME: alpa.meshes = [{devices = array<i64: 0, 1>, hosts = array<i64: 0>, logical_shape = array<i64: 2>, name = "mesh_0"}, {devices = array<i64: 2>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_1"}, {devices = array<i64: 3>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_2"}]
// CHECK: mpmd.fragment<mesh="mesh_0", origin=["layer_0", "layer_1"], stage=0> (%[[U]])
// CHECK: mpmd.fragment<mesh="mesh_2", origin=["layer_2"], stage=2> (%{{.*}}, %[[V]])
func.func public @held(%u: !a, %v: !a) -> !a
    attributes {alpa.held = [{input = 0 : i64, shardings = [#sdy.sharding<@mesh_0, [{}, {"axis0"}]>]},
                             {input = 1 : i64, shardings = [#sdy.sharding<@mesh_2, [{}, {}]>]}]} {
  %0 = mpmd.named_computation<"layer_0"> (%u) {alpa.flops = 32 : i64} (%a: !a) {
    %3 = stablehlo.tanh %a : !a
    mpmd.return %3 : !a
  } : (!a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %u) {alpa.flops = 32 : i64} (%a: !a, %b: !a) {
    %3 = stablehlo.add %a, %b : !a
    mpmd.return %3 : !a
  } : (!a, !a) -> !a
  %2 = mpmd.named_computation<"layer_2"> (%1, %v) {alpa.flops = 32 : i64} (%a: !a, %b: !a) {
    %3 = stablehlo.add %a, %b : !a
    mpmd.return %3 : !a
  } : (!a, !a) -> !a
  return %2 : !a
}

// -----

// What is held on several meshes is read where each reader is; with nothing to move, the seconds
// decide: one stage sends nothing.
!a = tensor<4x8xf32>
// CHECK-LABEL: module {
// CHECK: func.func public @main
// CHECK-SAME: (%[[X:[^:]*]]: !mpmd.mesh_tensor<"mesh_{{[0-2]}}", tensor<4x8xf32>, sharding=<@mesh_{{[0-2]}}, [{}, {}]>> {alpa.input = 0 : i64})
// CHECK: mpmd.fragment<{{.*}}origin=["layer_0", "layer_1"]
// CHECK-NOT: mpmd.transfer
func.func public @held_twice(%x: !a) -> !a
    attributes {alpa.held = [{input = 0 : i64, shardings = [
      #sdy.sharding<@mesh_0, [{}, {}]>, #sdy.sharding<@mesh_1, [{}, {}]>, #sdy.sharding<@mesh_2, [{}, {}]>]}]} {
  %0 = mpmd.named_computation<"layer_0"> (%x) {alpa.flops = 32 : i64} (%a: !a) {
    %2 = stablehlo.tanh %a : !a
    mpmd.return %2 : !a
  } : (!a) -> !a
  %1 = mpmd.named_computation<"layer_1"> (%0, %x) {alpa.flops = 32 : i64} (%a: !a, %b: !a) {
    %2 = stablehlo.add %a, %b : !a
    mpmd.return %2 : !a
  } : (!a, !a) -> !a
  return %1 : !a
}
