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
