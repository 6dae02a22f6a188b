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

// -----

// The size of the window is a value of an argument.
func.func public @main(%x: tensor<?xf32>, %window: tensor<1xi32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %ok = stablehlo.compare EQ, %n, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "'n' = {0} from specification 'n' for dimension x.shape[0] (= {0}), ."} : (tensor<i1>, tensor<i32>) -> ()
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1> : tensor<1xi32>
  %padding = stablehlo.constant dense<0> : tensor<1x2xi32>
  // expected-error @+1 {{dimension 0 of result 0 of stablehlo.custom_call is dynamic (tensor<?xf32>)}}
  %0 = stablehlo.custom_call @stablehlo.dynamic_reduce_window(%x, %zero, %window, %one, %one, %one, %padding) {api_version = 2 : i32, called_computations = [@sum]} : (tensor<?xf32>, tensor<f32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>, tensor<1xi32>, tensor<1x2xi32>) -> tensor<?xf32>
  return %0 : tensor<?xf32>
}
func.func private @sum(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.add %a, %b : tensor<f32>
  return %0 : tensor<f32>
}
