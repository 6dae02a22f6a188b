// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='refine-dimensions{sizes=n=4}'

// The shape of the result depends on a value of an argument.
func.func public @by_value(%x: tensor<?xf32>, %s: tensor<1xi32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %ok = stablehlo.compare EQ, %n, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "'n' = {0} from specification 'n' for dimension x.shape[0] (= {0}), ."} : (tensor<i1>, tensor<i32>) -> ()
  // expected-error @+1 {{dimension 0 of result 0 of stablehlo.dynamic_reshape is dynamic (tensor<?xf32>)}}
  %0 = stablehlo.dynamic_reshape %x, %s : (tensor<?xf32>, tensor<1xi32>) -> tensor<?xf32>
  return %0 : tensor<?xf32>
}

// -----

// expected-error @+1 {{n=4 cannot be checked: size is ?; choose another size}}
func.func public @unknown_assertion(%x: tensor<?xf32>, %s: tensor<i32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %ok = stablehlo.compare EQ, %n, %s : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %s, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "size is {0}. Obtained dimension variables: 'n' = {1} from specification 'n' for dimension x.shape[0] (= {1}), ."} : (tensor<i1>, tensor<i32>, tensor<i32>) -> ()
  return %x : tensor<?xf32>
}

// -----

// expected-error @+1 {{an assertion refers to {3} and has 1 sizes}}
func.func public @broken_assertion(%x: tensor<?xf32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %ok = stablehlo.compare EQ, %n, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "'n' = {0} from specification 'n' for dimension x.shape[0] (= {3}), ."} : (tensor<i1>, tensor<i32>) -> ()
  return %x : tensor<?xf32>
}

// -----

// expected-error @+1 {{x.shape[0] has the size 'n.m', which cannot be computed}}
func.func public @no_expression(%x: tensor<?xf32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %ok = stablehlo.compare EQ, %n, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "'n' = {0} from specification 'n.m' for dimension x.shape[0] (= {0}), ."} : (tensor<i1>, tensor<i32>) -> ()
  return %x : tensor<?xf32>
}
