// RUN: alpa-opt %s --split-input-file --pipeline='token-slice{lengths=3+1}' | filecheck %s

// The second slice reads the keys of the first one, and hands on what it sends back to them. The
// loss and the gradient of the weights are added up from slice to slice.
!w = !mpmd.mesh_tensor<"mesh_0", tensor<3x3xf32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
!p = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x4xf32>>
!l = !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  // CHECK-LABEL: func.func public @attention
  func.func public @attention(%w: !w {alpa.role = "state"}, %x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w, !l) attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
    // CHECK-NEXT: %[[F:.*]]:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%arg1, %arg0) {alpa.flops = [[N:.*]] : i64, alpa.part = "forward", alpa.seconds = 0.69{{.*}} : f64} (%[[X:.*]]: tensor<2x4x3xf32>, %[[W:.*]]: tensor<3x3xf32>)
    // CHECK: %[[XS:.*]] = stablehlo.slice %[[X]] [0:2, 0:3, 0:3]
    // CHECK-NEXT: %[[K:.*]] = stablehlo.dot_general %[[XS]], %[[W]]
    // CHECK-NEXT: stablehlo.dot_general %[[K]], %[[K]], {{.*}} -> tensor<2x3x3xf32>
    // CHECK: mpmd.return %[[K]], %[[P:.*]], %[[L:.*]] : tensor<2x3x3xf32>, tensor<2x3x3xf32>, tensor<f32>
    // CHECK: %[[G:.*]]:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%arg1, %arg0, %[[F]]#0, %[[F]]#2) {{.*}} (%[[X2:.*]]: tensor<2x4x3xf32>, %[[W2:.*]]: tensor<3x3xf32>, %[[EARLIER:.*]]: tensor<2x3x3xf32>, %[[LOSS:.*]]: tensor<f32>)
    // CHECK: %[[XS2:.*]] = stablehlo.slice %[[X2]] [0:2, 3:4, 0:3]
    // CHECK-NEXT: %[[K2:.*]] = stablehlo.dot_general %[[XS2]], %[[W2]]
    // CHECK-NEXT: %[[KEYS:.*]] = stablehlo.concatenate %[[EARLIER]], %[[K2]], dim = 1
    // CHECK-NEXT: stablehlo.dot_general %[[K2]], %[[KEYS]], {{.*}} -> tensor<2x1x4xf32>
    // The mask is cut to the queries of the slice and the keys up to its end.
    // CHECK: %[[MASK:.*]] = stablehlo.compare
    // CHECK-NEXT: stablehlo.slice %[[MASK]] [3:4, 0:4]
    // CHECK: %[[OWN:.*]] = stablehlo.reduce
    // CHECK-NEXT: %[[L2:.*]] = stablehlo.add %[[OWN]], %[[LOSS]]
    // CHECK-NEXT: mpmd.return %[[K2]], %[[P2:.*]], %[[L2]] : tensor<2x1x3xf32>, tensor<2x1x4xf32>, tensor<f32>
    // CHECK: %[[B:.*]]:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%[[G]]#1, %[[G]]#0, %arg1) {alpa.part = "backward"}
    // CHECK: %[[D:.*]] = stablehlo.dot_general {{.*}} -> tensor<2x4x3xf32>
    // CHECK-NEXT: stablehlo.slice %[[D]] [0:2, 3:4, 0:3]
    // CHECK: %[[DW:.*]] = stablehlo.dot_general {{.*}} -> tensor<3x3xf32>
    // CHECK-NEXT: %[[FOR_EARLIER:.*]] = stablehlo.slice %[[D]] [0:2, 0:3, 0:3]
    // CHECK-NEXT: mpmd.return %[[DW]], %[[FOR_EARLIER]]
    // CHECK: %[[C:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%[[F]]#1, %[[B]]#1, %[[F]]#0, %arg1, %[[B]]#0) {alpa.part = "backward"} (%[[P3:.*]]: tensor<2x3x3xf32>, %[[LATER:.*]]: tensor<2x3x3xf32>, {{.*}}: tensor<2x3x3xf32>, {{.*}}: tensor<2x4x3xf32>, %[[SUM:.*]]: tensor<3x3xf32>)
    // CHECK: %[[D3:.*]] = stablehlo.dot_general %[[P3]]
    // CHECK-NEXT: stablehlo.add %[[D3]], %[[LATER]]
    // CHECK: %[[DW3:.*]] = stablehlo.dot_general {{.*}} -> tensor<3x3xf32>
    // CHECK-NEXT: %[[ALL:.*]] = stablehlo.add %[[DW3]], %[[SUM]]
    // CHECK-NEXT: mpmd.return %[[ALL]]
    // CHECK: %[[U:.*]] = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%arg0, %[[C]])
    // CHECK: return %[[U]], %[[G]]#2
    %f:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%w, %x) {alpa.part = "forward", alpa.flops = 100 : i64, alpa.seconds = 1.0 : f64} (%a: tensor<3x3xf32>, %b: tensor<2x4x3xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %k = stablehlo.dot_general %b, %a, contracting_dims = [2] x [0] : (tensor<2x4x3xf32>, tensor<3x3xf32>) -> tensor<2x4x3xf32>
      %s = stablehlo.dot_general %k, %k, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x4xf32>
      %i = stablehlo.iota dim = 0 : tensor<4x4xi32>
      %j = stablehlo.iota dim = 1 : tensor<4x4xi32>
      %m = stablehlo.compare GE, %i, %j : (tensor<4x4xi32>, tensor<4x4xi32>) -> tensor<4x4xi1>
      %n = stablehlo.broadcast_in_dim %m, dims = [1, 2] : (tensor<4x4xi1>) -> tensor<2x4x4xi1>
      %zeros = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<2x4x4xf32>
      %p = stablehlo.select %n, %s, %zeros : tensor<2x4x4xi1>, tensor<2x4x4xf32>
      %y = stablehlo.dot_general %p, %k, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x4x4xf32>, tensor<2x4x3xf32>) -> tensor<2x4x3xf32>
      %l = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0, 1, 2] : (tensor<2x4x3xf32>, tensor<f32>) -> tensor<f32>
      mpmd.return %k, %p, %l : tensor<2x4x3xf32>, tensor<2x4x4xf32>, tensor<f32>
    } : (!w, !x) -> (!x, !p, !l)
    %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %f#0, %f#1) {alpa.part = "backward"} (%b: tensor<2x4x3xf32>, %k: tensor<2x4x3xf32>, %p: tensor<2x4x4xf32>) {
      %one = stablehlo.constant dense<1.0> : tensor<f32>
      %ones = stablehlo.broadcast_in_dim %one, dims = [] : (tensor<f32>) -> tensor<2x4x3xf32>
      %d = stablehlo.dot_general %p, %ones, batching_dims = [0] x [0], contracting_dims = [1] x [1] : (tensor<2x4x4xf32>, tensor<2x4x3xf32>) -> tensor<2x4x3xf32>
      %h = stablehlo.multiply %d, %k : tensor<2x4x3xf32>
      %g = stablehlo.dot_general %b, %h, contracting_dims = [0, 1] x [0, 1] : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<3x3xf32>
      mpmd.return %g : tensor<3x3xf32>
    } : (!x, !x, !p) -> !w
    %u = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%w, %g) {alpa.part = "update"} (%a: tensor<3x3xf32>, %b: tensor<3x3xf32>) {
      %c = stablehlo.subtract %a, %b : tensor<3x3xf32>
      mpmd.return %c : tensor<3x3xf32>
    } : (!w, !w) -> !w
    return %u, %f#2 : !w, !l
  }
}

// -----

// Slices go through the stages one after the other. Positions are cut, vocabularies are not. A row
// per token is put together where the caller reads it.
!i = !mpmd.mesh_tensor<"mesh_0", tensor<2x4xi32>>
!e = !mpmd.mesh_tensor<"mesh_0", tensor<5x3xf32>>
!q = !mpmd.mesh_tensor<"mesh_0", tensor<4x3xf32>>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<2x4x3xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  // CHECK-LABEL: func.func public @two_stages
  func.func public @two_stages(%i: !i {alpa.role = "batch", alpa.batch_dim = 0 : i64}, %e: !e, %q: !q) -> !y attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
    // CHECK-NEXT: %[[A:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
    // CHECK: "stablehlo.gather"{{.*}} : (tensor<5x3xf32>, tensor<2x3x1xi32>) -> tensor<2x3x3xf32>
    // CHECK: stablehlo.slice {{.*}} [0:3, 0:3] : (tensor<4x3xf32>) -> tensor<3x3xf32>
    // CHECK: %[[TA:.*]] = mpmd.transfer %[[A]]
    // CHECK-NEXT: %[[R:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%[[TA]])
    // CHECK: %[[B:.*]] = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0>
    // CHECK: stablehlo.slice {{.*}} [3:4, 0:3] : (tensor<4x3xf32>) -> tensor<1x3xf32>
    // CHECK: %[[TB:.*]] = mpmd.transfer %[[B]]
    // CHECK-NEXT: %[[ALL:.*]] = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%[[TB]], %[[R]])
    // CHECK: stablehlo.concatenate {{.*}}, dim = 1 : (tensor<2x3x3xf32>, tensor<2x1x3xf32>) -> tensor<2x4x3xf32>
    // CHECK: return %[[ALL]]
    %f = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%i, %e, %q) {alpa.part = "forward"} (%a: tensor<2x4xi32>, %b: tensor<5x3xf32>, %c: tensor<4x3xf32>) {
      %0 = stablehlo.reshape %a : (tensor<2x4xi32>) -> tensor<2x4x1xi32>
      %1 = "stablehlo.gather"(%b, %0) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 3>}> : (tensor<5x3xf32>, tensor<2x4x1xi32>) -> tensor<2x4x3xf32>
      %2 = stablehlo.broadcast_in_dim %c, dims = [1, 2] : (tensor<4x3xf32>) -> tensor<2x4x3xf32>
      %3 = stablehlo.add %1, %2 : tensor<2x4x3xf32>
      mpmd.return %3 : tensor<2x4x3xf32>
    } : (!i, !e, !q) -> !x
    %t = mpmd.transfer %f : (!x) -> !y
    %g = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%t) {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
      %0 = stablehlo.tanh %a : tensor<2x4x3xf32>
      mpmd.return %0 : tensor<2x4x3xf32>
    } : (!y) -> !y
    return %g : !y
  }
}
