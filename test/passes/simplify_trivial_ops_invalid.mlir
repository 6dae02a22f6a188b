// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file --verify-diagnostics

// expected-error @+1 {{empty module: it holds no function to plan}}
module {
}

// -----

// expected-error @+1 {{no public function: @a and @b can be called by nobody; remove 'private' from the one to plan}}
func.func private @a(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
func.func private @b(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{2 public functions, @a and @b; one is planned: make the others private}}
func.func @a(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
// expected-note @+1 {{also public}}
func.func public @b(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{dimension 1 of argument 0 of @dynamic_argument is dynamic (tensor<4x?xf32>); refine the module to static shapes first, for example export it with concrete shapes}}
func.func @dynamic_argument(%x: tensor<4x?xf32>) {
  return
}

// -----

func.func @dynamic_op(%x: tensor<4xf32>, %n: tensor<1xi32>) {
  // expected-error @+1 {{dimension 0 of result 0 of stablehlo.dynamic_reshape is dynamic (tensor<?xf32>); refine the module}}
  %0 = stablehlo.dynamic_reshape %x, %n : (tensor<4xf32>, tensor<1xi32>) -> tensor<?xf32>
  return
}

// -----

// expected-error @+1 {{argument 0 of @unranked has no rank (tensor<*xf32>)}}
func.func @unranked(%x: tensor<*xf32>) {
  return
}

// -----

func.func @recursion(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @even(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
// expected-note @+1 {{@even is here}}
func.func private @even(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @odd(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @odd(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{recursion, @even -> @odd -> @even: it cannot be unrolled; write it as stablehlo.while}}
  %0 = call @even(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func @declaration(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{it calls @elsewhere, which has no body}}
  %0 = call @elsewhere(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
// expected-note @+1 {{@elsewhere is here}}
func.func private @elsewhere(tensor<4xf32>) -> tensor<4xf32>

// -----

// expected-error @+1 {{a program for 4 replicas (mhlo.num_replicas); give the program of one device: lower it with jit instead of pmap}}
module attributes {mhlo.num_replicas = 4 : i32} {
  func.func @replicas(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

func.func @gspmd_shard_map(%x: tensor<4xf32>) -> tensor<2xf32> {
  // expected-error @+1 {{@SPMDFullToShardShape is shard_map in GSPMD's form; export the program again with Shardy}}
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<4xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}
