// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x2 num-stages=4 num-micro-batches=2 schedule=zb-v}' | filecheck %s

// Four stages on two meshes in the shape of a V: a value stays where the next stage is on its mesh.
// CHECK: func.func public @main(%arg0: !mpmd.mesh_tensor<"mesh_0", tensor<64x64xf32>>
// CHECK-SAME: %arg1: !mpmd.mesh_tensor<"mesh_1", tensor<64x64xf32>> {alpa.input = 1 : i64
// CHECK-SAME: alpa.meshes = [{devices = array<i64: 0>, hosts = array<i64: 0>, logical_shape = array<i64: 1>, name = "mesh_0"}, {devices = array<i64: 1>
// CHECK-SAME: schedule = "zb-v"
// CHECK: %[[A:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
// CHECK: %[[B:.*]] = mpmd.transfer %[[A]]
// CHECK: %[[C:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%[[B]], %{{.*}})
// CHECK: %[[D:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_2"], stage=2> (%[[C]], %{{.*}})
// CHECK: %[[E:.*]] = mpmd.transfer %[[D]]
// CHECK: %[[F:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_3"], stage=3> (%[[E]], %{{.*}})
// CHECK: return %[[F]]
func.func public @in_the_shape_of_a_v(
    %w0: tensor<64x64xf32> {alpa.role = "constant"}, %w1: tensor<64x64xf32> {alpa.role = "constant"},
    %x: tensor<64x64xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<64x64xf32> {alpa.result = "concat:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w0) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = mpmd.named_computation<"layer_1"> (%0, %w1) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %2 = mpmd.named_computation<"layer_2"> (%1, %w1) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %3 = mpmd.named_computation<"layer_3"> (%2, %w0) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %3 : tensor<64x64xf32>
}
