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
  // expected-error @+1 {{@SPMDFullToShardShape is shard_map in GSPMD's form; run import-hlo first, which writes it as sdy.manual_computation}}
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<4xf32>) -> tensor<2xf32>
  return %0 : tensor<2xf32>
}

// -----

func.func @callback(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{@xla_ffi_python_cpu_callback is a callback into Python (jax.debug.print, jax.pure_callback, jax.debug.inspect_array_sharding), and the processes that run a plan do not have that Python function; remove the call}}
  %0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) {mhlo.backend_config = {index = 0 : ui64}} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

sdy.mesh @mesh = <["a"=2]>
func.func @print_of_a_shard(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}]>] out_shardings=[<@mesh, [{"a"}]>] manual_axes={"a"} (%y: tensor<2xf32>) {
    // expected-error @+1 {{@xla_ffi_partitioned_python_gpu_callback is a callback into Python}}
    stablehlo.custom_call @xla_ffi_partitioned_python_gpu_callback(%y) {has_side_effect = true} : (tensor<2xf32>) -> ()
    sdy.return %y : tensor<2xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func @inspection(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{@InspectSharding is a callback into Python}}
  %0 = stablehlo.custom_call @InspectSharding(%x) {has_side_effect = true} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{a token orders side effects, which several devices cannot keep in order; lower the program without ordered effects}}
func.func @tokens(%t: !stablehlo.token, %x: tensor<4xf32>) -> (!stablehlo.token, tensor<4xf32>) {
  return %t, %x : !stablehlo.token, tensor<4xf32>
}

// -----

func.func @outfeed(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{a token orders side effects}}
  %t = stablehlo.create_token : !stablehlo.token
  %0 = "stablehlo.outfeed"(%x, %t) : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 says for which of several platforms the program is to run; export it for one}}
func.func @platforms(%i: tensor<i32> {jax.global_constant = "_platform_index"}, %x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

func.func @collective_of_several_devices(%x: tensor<4xf32>) -> tensor<8xf32> {
  // expected-error @+1 {{stablehlo.all_gather of several devices, but the program is that of one: collectives stand in sdy.manual_computation, as jax.shard_map writes it}}
  %0 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> : (tensor<4xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}

// -----

// expected-error @+1 {{argument 0 of @index_argument is index, not a tensor; make it a tensor<i64>}}
func.func public @index_argument(%x: index, %y: tensor<4xf32>) -> tensor<4xf32> {
  return %y : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 1 of @scalar_argument is f32, not a tensor; make it a tensor<f32>}}
func.func public @scalar_argument(%x: tensor<4xf32>, %y: f32) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

func.func public @scalar_inside(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{result 0 of arith.constant is f32, not a tensor; make it a tensor<f32>}}
  %0 = arith.constant 1.0 : f32
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 of @buffer_argument is memref<4xf32>, which StableHLO lacks; use a tensor}}
func.func public @buffer_argument(%x: memref<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  return %y : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 1 of @tensor_of_tokens is tensor<4x!stablehlo.token>, whose elements are not of StableHLO; use one of its integers, floats or complex numbers}}
func.func public @tensor_of_tokens(%x: tensor<4xf32>, %y: tensor<4x!stablehlo.token>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 of @signed_integers is tensor<4xsi32>, whose elements are not of StableHLO}}
func.func public @signed_integers(%x: tensor<4xsi32>) -> tensor<4xsi32> {
  return %x : tensor<4xsi32>
}

// -----

func.func public @shape_in_index(%x: tensor<f32>) -> tensor<8x16xf32> {
  // expected-error @+1 {{result 0 of arith.constant is tensor<2xindex>, whose elements have no size; write i64, or make constant shapes static by func.func(stablehlo-canonicalize-dynamism)}}
  %shape = arith.constant dense<[8, 16]> : tensor<2xindex>
  %0 = stablehlo.dynamic_broadcast_in_dim %x, %shape, dims = [] : (tensor<f32>, tensor<2xindex>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
// expected-error @+1 {{argument 0 is on mesh_0: this program has been cut into stages already; plan the one that it was made from}}
func.func public @planned_already(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
  return %x : !x
}

// -----

// expected-error @+1 {{argument 0 has alpa.batch_dim = -1, but 2 dimensions; count them from 0}}
func.func public @batch_dim_before_the_first(%x: tensor<4x8xf32> {alpa.batch_dim = -1 : i64}) -> tensor<4x8xf32> {
  return %x : tensor<4x8xf32>
}

// -----

// expected-error @+1 {{argument 0 has alpa.batch_dim = 2, but 2 dimensions; count them from 0}}
func.func public @batch_dim_behind_the_last(%x: tensor<4x8xf32> {alpa.batch_dim = 2 : i64}) -> tensor<4x8xf32> {
  return %x : tensor<4x8xf32>
}

// -----

// expected-error @+1 {{argument 0 has tf.aliasing_output = 0, but is tensor<4x8xf32>, and that result is tensor<8x4xf32>; a result can take the place of an argument of the same type only}}
func.func public @donated_to_another_shape(%x: tensor<4x8xf32> {tf.aliasing_output = 0 : i32}) -> tensor<8x4xf32> {
  %0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}

// -----

// expected-error @+1 {{argument 1 has tf.aliasing_output = 0, but so has argument 0: a result can take one place only}}
func.func public @donated_twice(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32}, %y: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{argument 0 has tf.aliasing_output = 2, but there are 1 results}}
func.func public @donated_to_no_result(%x: tensor<4xf32> {tf.aliasing_output = 2 : i32}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{mhlo.num_replicas is "two"; expected an integer}}
module attributes {mhlo.num_replicas = "two"} {
  func.func public @replicas_in_words(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

// expected-error @+1 {{mhlo.memory_kind of argument 0 is 3 : i64; expected a string}}
func.func public @memory_of_an_argument(%x: tensor<4xf32> {mhlo.memory_kind = 3 : i64}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// expected-error @+1 {{mhlo.memory_kind of result 1 is 3 : i64; expected a string}}
func.func public @memory_of_a_result(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32> {mhlo.memory_kind = 3 : i64}) {
  return %x, %x : tensor<4xf32>, tensor<4xf32>
}

// -----

func.func public @placement(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{_xla_buffer_placement is true; expected a string}}
  %0 = stablehlo.custom_call @annotate_device_placement(%x) {mhlo.frontend_attributes = {_xla_buffer_placement = true}} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

func.func public @placement_attributes(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{mhlo.frontend_attributes is 3 : i64; expected a dictionary}}
  %0 = stablehlo.custom_call @annotate_device_placement(%x) {mhlo.frontend_attributes = 3 : i64} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// expected-error @+1 {{jax.global_constant of argument 0 is 3 : i64; expected a string}}
func.func public @global_constant(%x: tensor<4xf32> {jax.global_constant = 3 : i64}) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
