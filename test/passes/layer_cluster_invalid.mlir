// RUN: alpa-opt %s --pipeline='layer-cluster{num-layers=2}' --split-input-file --verify-diagnostics

// expected-error @+1 {{cannot cut 1 forward ops into 2 layers; ask for 1 to 1 with num-layers}}
func.func public @more_layers_than_ops(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{alpa.role is "weights"; expected one of batch, state, key, constant}}
func.func public @unknown_role(%x: tensor<4xf32> {alpa.role = "weights"}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{alpa.result is "average"; expected concat:<dim>, mean, sum, last or state:<argument>}}
func.func public @unknown_result(%x: tensor<4xf32>) -> (tensor<4xf32> {alpa.result = "average"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{alpa.result is "concat:-1"; expected concat:<dim>}}
func.func public @negative_dimension(%x: tensor<4xf32>) -> (tensor<4xf32> {alpa.result = "concat:-1"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{result 0 is the new value of argument 1, but @main has 1 arguments}}
func.func public @state_of_no_argument(%x: tensor<4xf32>) -> (tensor<4xf32> {alpa.result = "state:1"}) {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{dimension 0 of argument 0 of @dynamic is dynamic}}
func.func public @dynamic(%x: tensor<?xf32>) -> tensor<?xf32> {
  return %x : tensor<?xf32>
}

// -----

// expected-error @+2 {{a layer takes 1.48e+20 operations, more than 64 bits can count}}
func.func public @too_large_for_this_world(%x: tensor<4194304x4194304xf32>) -> tensor<4194304x4194304xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : (tensor<4194304x4194304xf32>, tensor<4194304x4194304xf32>) -> tensor<4194304x4194304xf32>
  %1 = stablehlo.dot_general %0, %x, contracting_dims = [1] x [0] : (tensor<4194304x4194304xf32>, tensor<4194304x4194304xf32>) -> tensor<4194304x4194304xf32>
  return %1 : tensor<4194304x4194304xf32>
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
// expected-error @+1 {{argument 0 is on mesh_0: this program has been cut into stages already; plan the one that it was made from}}
func.func public @planned_already(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
  return %x : !x
}

// -----

// expected-error @+1 {{argument 0 is tuple<tensor<8xf32>>; run import-hlo, which replaces it by its elements}}
func.func public @tuple(%t: tuple<tensor<8xf32>>, %x: tensor<8xf32>) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}
