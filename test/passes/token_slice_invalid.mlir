// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='token-slice{lengths=3+1}'

// expected-error@+1 {{there are no stages to cut; run stage-mesh-partition before}}
func.func public @no_stages(%x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  return %x : tensor<2x4xf32>
}

// -----

// Nothing masks the keys after a query.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
sdy.mesh @mesh_0 = <["a"=1]>
func.func public @bidirectional(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
    %0 = stablehlo.dot_general %a, %a, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x4xf32>
    // expected-error@+1 {{the program is not causal: stablehlo.dot_general multiplies and adds up over keys after the query: no causal mask is in front of it; token slices need a model in which no token reads later ones}}
    %1 = stablehlo.dot_general %0, %a, batching_dims = [0] x [0], contracting_dims = [2] x [1] : (tensor<2x4x4xf32>, tensor<2x4x3xf32>) -> tensor<2x4x3xf32>
    mpmd.return %1 : tensor<2x4x3xf32>
  } : (!x) -> !x
  return %y : !x
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x5xf32>>
sdy.mesh @mesh_0 = <["a"=1]>
// expected-error@+1 {{no dimension of the batch has 4 tokens; beside the samples, there are dimensions of 5}}
func.func public @other_length(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<2x5xf32>) {
    %0 = stablehlo.tanh %a : tensor<2x5xf32>
    mpmd.return %0 : tensor<2x5xf32>
  } : (!x) -> !x
  return %y : !x
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<4xf32>>
sdy.mesh @mesh_0 = <["a"=1]>
// expected-error@+1 {{no batch argument has a dimension for tokens beside that of its samples}}
func.func public @samples_only(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<4xf32>) {
    %0 = stablehlo.tanh %a : tensor<4xf32>
    mpmd.return %0 : tensor<4xf32>
  } : (!x) -> !x
  return %y : !x
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
sdy.mesh @mesh_0 = <["a"=2]>
func.func public @with_shardings(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
  // expected-error@+1 {{the fragment's results have shardings, which are those of whole sequences; run token-slice directly after stage-mesh-partition}}
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<2x4xf32>) {
    %0 = stablehlo.tanh %a : tensor<2x4xf32>
    mpmd.return %0 : tensor<2x4xf32>
  } : (!x) -> !x
  return %y : !x
}

// -----

// A mask lets the scores be used, but not be returned.
!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
!s = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x4xf32>>
sdy.mesh @mesh_0 = <["a"=1]>
func.func public @scores(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !s attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
  // expected-error@+1 {{scores of attention leave the stage for an update or the caller}}
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
    %0 = stablehlo.dot_general %a, %a, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x4xf32>
    %2 = stablehlo.iota dim = 1 : tensor<2x4x4xf32>
    %3 = stablehlo.iota dim = 2 : tensor<2x4x4xf32>
    %4 = stablehlo.compare GE, %2, %3 : (tensor<2x4x4xf32>, tensor<2x4x4xf32>) -> tensor<2x4x4xi1>
    %5 = stablehlo.convert %4 : (tensor<2x4x4xi1>) -> tensor<2x4x4xf32>
    %6 = stablehlo.multiply %0, %5 : tensor<2x4x4xf32>
    mpmd.return %6 : tensor<2x4x4xf32>
  } : (!x) -> !s
  return %y : !s
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
!s = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x4xf32>>
sdy.mesh @mesh_0 = <["a"=1]>
func.func public @scores_without_a_mask(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !s attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
  %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
    // expected-error@+1 {{the program is not causal: stablehlo.dot_general makes numbers for pairs of tokens, and no mask tells queries from keys}}
    %0 = stablehlo.dot_general %a, %a, batching_dims = [0] x [0], contracting_dims = [2] x [2] : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x4xf32>
    mpmd.return %0 : tensor<2x4x4xf32>
  } : (!x) -> !s
  return %y : !s
}
