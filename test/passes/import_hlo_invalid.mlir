// RUN: alpa-opt %s --pipeline='import-hlo' --split-input-file --verify-diagnostics

func.func public @call_that_takes_a_tuple(%x: tensor<4xf32>) -> tensor<4xf32> {
  %t = stablehlo.tuple %x, %x : tuple<tensor<4xf32>, tensor<4xf32>>
  // expected-error @+1 {{stablehlo.custom_call takes a tuple, which cannot be replaced by its elements; remove it}}
  %r = stablehlo.custom_call @foo(%t) : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}

// -----

module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 3 : i64}, output_index = array<i64>}]} {
  // expected-error @+1 {{mhlo.input_output_alias names argument [3], which @main does not have}}
  func.func public @no_such_argument(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64: 1>}]} {
  // expected-error @+1 {{mhlo.input_output_alias names result [0, 1], which @main does not have}}
  func.func public @no_such_result(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

// expected-error @+1 {{mhlo.input_output_alias = 7 : i64: expected}}
module attributes {mhlo.input_output_alias = 7} {
  func.func public @no_alias(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

// expected-error @+1 {{mhlo.input_output_alias = [{alias = 1 : i64}]: expected}}
module attributes {mhlo.input_output_alias = [{alias = 1}]} {
  func.func public @half_an_alias(%x: tensor<4xf32>) -> tensor<4xf32> {
    return %x : tensor<4xf32>
  }
}

// -----

func.func public @shard_map_over_some_axes(%x: tensor<8xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[2,2]<=[4] last_tile_dim_replicate}"} : (tensor<8xf32>) -> tensor<8xf32>
  // expected-error @+1 {{a shard_map over some axes of its mesh only ({devices=[1,2,2]<=[4] last_tile_dims={manual, replicated}}), in GSPMD's form; export the program again with Shardy, jax's default partitioner}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{devices=[1,2,2]<=[4] last_tile_dims={manual, replicated}}"} : (tensor<8xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

func.func public @parts_of_nothing(%x: tensor<8xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{@SPMDFullToShardShape takes no result of an @Sharding call, which says what part of the array is on which device}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}

// -----

func.func public @all_on_one_device(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{maximal device=0}"} : (tensor<8xf32>) -> tensor<8xf32>
  // expected-error @+1 {{the sharding of an array of shard_map: {maximal device=0} does not cut an array into tiles}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<8xf32>
  return %1 : tensor<8xf32>
}

// -----

func.func public @devices_in_no_order(%x: tensor<8xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]0,3,1,2}"} : (tensor<8xf32>) -> tensor<8xf32>
  // expected-error @+1 {{the devices of {devices=[4]0,3,1,2} are in an order that no mesh has}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  return %1 : tensor<2xf32>
}

// -----

module attributes {mhlo.num_partitions = 8 : i32} {
  func.func public @other_devices(%x: tensor<8xf32>) -> tensor<2xf32> {
    %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
    // expected-error @+1 {{shard_map and mhlo.num_partitions are for 4 and 8 devices}}
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
    return %1 : tensor<2xf32>
  }
}

// -----

func.func public @no_mesh_in_common(%x: tensor<12xf32>) -> tensor<6xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[2,3]<=[6] last_tile_dim_replicate}"} : (tensor<12xf32>) -> tensor<12xf32>
  // expected-error @+1 {{the shardings of shard_map have no mesh in common: no mesh has axes that end after 1, 2, 3, 6 devices}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<12xf32>) -> tensor<6xf32>
  %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {mhlo.sharding = "{devices=[3,2]<=[6] last_tile_dim_replicate}"} : (tensor<6xf32>) -> tensor<6xf32>
  return %2 : tensor<6xf32>
}

// -----

func.func public @parts_of_another_size(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  // expected-error @+1 {{the sharding makes parts of tensor<2xf32>, and this one is tensor<4xf32>}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<4xf32>
  %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<4xf32>) -> tensor<8xf32>
  return %2 : tensor<8xf32>
}

// -----

func.func public @a_whole_array_inside(%x: tensor<8xf32>, %y: tensor<2xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  // expected-error @+1 {{an op of shard_map reads a whole array; in GSPMD's form, each array goes through @SPMDFullToShardShape}}
  %2 = stablehlo.add %1, %y : tensor<2xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  return %3 : tensor<8xf32>
}

// -----

func.func public @a_part_is_returned(%x: tensor<8xf32>) -> tensor<2xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  // expected-error @+1 {{a part of an array does not go through @SPMDShardToFullShape}}
  return %1 : tensor<2xf32>
}

// -----

func.func public @a_circle(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  // expected-error @+1 {{ops of a shard_map depend on whole arrays that it makes itself}}
  %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  %2 = stablehlo.tanh %1 : tensor<2xf32>
  %3 = stablehlo.custom_call @SPMDShardToFullShape(%2) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  %4 = stablehlo.custom_call @Sharding(%3) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<8xf32>) -> tensor<8xf32>
  %5 = stablehlo.custom_call @SPMDFullToShardShape(%4) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<2xf32>
  %6 = stablehlo.add %2, %5 : tensor<2xf32>
  %7 = stablehlo.custom_call @SPMDShardToFullShape(%6) {mhlo.sharding = "{devices=[4]<=[4]}"} : (tensor<2xf32>) -> tensor<8xf32>
  return %7 : tensor<8xf32>
}

// -----

module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64: 0>}, {alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 1 : i64}, output_index = array<i64: 0>}]} {
  // expected-error @+1 {{mhlo.input_output_alias names argument 1 or result 0 twice: a result can take one place, and a place has one result}}
  func.func public @one_result_in_two_places(%w: tensor<4xf32>, %x: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
    return %x, %w : tensor<4xf32>, tensor<4xf32>
  }
}

// -----

module {
  sdy.mesh @mesh = <["a"=2]>
  func.func public @partial_sums(%x: tensor<4xf32>) -> tensor<4xf32> {
    // expected-error @+1 {{sdy.all_reduce is about the partial sums of a program that has been partitioned; plan the program from before}}
    %0 = sdy.all_reduce {"a"} %x out_sharding=<@mesh, [{}]> : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

// expected-error @+1 {{mhlo.num_partitions is "two"; expected an integer}}
module attributes {mhlo.num_partitions = "two"} {
  func.func public @partitions_in_words(%x: tensor<8xf32>) -> tensor<8xf32> {
    %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[2]<=[2]}"} : (tensor<8xf32>) -> tensor<8xf32>
    %1 = stablehlo.custom_call @SPMDFullToShardShape(%0) {mhlo.sharding = "{manual}"} : (tensor<8xf32>) -> tensor<4xf32>
    %2 = stablehlo.custom_call @SPMDShardToFullShape(%1) {mhlo.sharding = "{devices=[2]<=[2]}"} : (tensor<4xf32>) -> tensor<8xf32>
    return %2 : tensor<8xf32>
  }
}

// -----

func.func public @sharding_without_words(%x: tensor<8xf32>) -> tensor<4xf32> {
  // expected-error @+1 {{mhlo.sharding is 3 : i64; expected a string}}
  %0 = stablehlo.custom_call @SPMDFullToShardShape(%x) {mhlo.sharding = 3 : i64} : (tensor<8xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
