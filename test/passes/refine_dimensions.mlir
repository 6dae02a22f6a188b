// RUN: alpa-opt %s --split-input-file --pipeline='refine-dimensions{sizes=n=4}' | filecheck %s

// A call, an expression, and a size that the program computes with.
// CHECK-LABEL: func.func public @wrapped(
// CHECK-SAME: %[[X:.*]]: tensor<4x3xf32> {alpa.role = "batch"}, %[[Y:.*]]: tensor<9xf32>) -> tensor<12xf32> {
// CHECK-NOT: call
// CHECK: %[[R:.*]] = stablehlo.reshape %[[X]] : (tensor<4x3xf32>) -> tensor<12xf32>
// CHECK: return %[[R]] : tensor<12xf32>
module {
  func.func public @wrapped(%x: tensor<?x3xf32> {alpa.role = "batch"}, %y: tensor<?xf32>) -> tensor<?xf32> {
    %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x3xf32>) -> tensor<i32>
    %m = stablehlo.get_dimension_size %y, dim = 0 : (tensor<?xf32>) -> tensor<i32>
    %c2 = stablehlo.constant dense<2> : tensor<i32>
    %c1 = stablehlo.constant dense<1> : tensor<i32>
    %twice = stablehlo.multiply %n, %c2 : tensor<i32>
    %more = stablehlo.add %twice, %c1 : tensor<i32>
    %ok = stablehlo.compare EQ, %m, %more : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.custom_call @shape_assertion(%ok, %m, %more, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "Found inconsistency between dimension size y.shape[0] (= {0}) and the specification '2*n + 1' (= {1}). Obtained dimension variables: 'n' = {2} from specification 'n' for dimension x.shape[0] (= {2}), ."} : (tensor<i1>, tensor<i32>, tensor<i32>, tensor<i32>) -> ()
    %0 = func.call @inner(%n, %x) : (tensor<i32>, tensor<?x3xf32>) -> tensor<?xf32>
    return %0 : tensor<?xf32>
  }
  func.func private @inner(%n: tensor<i32>, %x: tensor<?x3xf32>) -> tensor<?xf32> {
    %c3 = stablehlo.constant dense<3> : tensor<i32>
    %0 = stablehlo.multiply %n, %c3 : tensor<i32>
    %1 = stablehlo.reshape %0 : (tensor<i32>) -> tensor<1xi32>
    %2 = stablehlo.dynamic_reshape %x, %1 : (tensor<?x3xf32>, tensor<1xi32>) -> tensor<?xf32>
    return %2 : tensor<?xf32>
  }
}

// -----

// A custom call that StableHLO's passes do not know, and its function, which JAX leaves public.
// CHECK-LABEL: func.func public @main(
// CHECK-SAME: %[[X:.*]]: tensor<4x3xf32> {alpa.role = "batch"}) -> (tensor<4x3xf32> {jax.result_info = "sums"}) {
// CHECK: "stablehlo.reduce_window"(%[[X]], %{{.*}}) <{
// CHECK-SAME: padding = dense<{{\[}}[3, 0], [0, 0]]>
// CHECK-SAME: window_dimensions = array<i64: 4, 1>
// CHECK: stablehlo.add
// CHECK: (tensor<4x3xf32>, tensor<f32>) -> tensor<4x3xf32>
// CHECK-NOT: @sum
// CHECK-NOT: shape_assertion
module {
  func.func public @main(%x: tensor<?x3xf32> {alpa.role = "batch"}) -> (tensor<?x3xf32> {jax.result_info = "sums"}) {
    %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x3xf32>) -> tensor<i32>
    %ok = stablehlo.compare EQ, %n, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.custom_call @shape_assertion(%ok, %n) {api_version = 2 : i32, has_side_effect = true, error_message = "'n' = {0} from specification 'n' for dimension x.shape[0] (= {0}), ."} : (tensor<i1>, tensor<i32>) -> ()
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %c0 = stablehlo.constant dense<0> : tensor<1xi32>
    %c1 = stablehlo.constant dense<1> : tensor<1xi32>
    %one = stablehlo.constant dense<1> : tensor<i32>
    %ones = stablehlo.constant dense<1> : tensor<2xi32>
    %less = stablehlo.subtract %n, %one : tensor<i32>
    %low = stablehlo.reshape %less : (tensor<i32>) -> tensor<1xi32>
    %rows = stablehlo.concatenate %low, %c0, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %columns = stablehlo.concatenate %c0, %c0, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %padding = stablehlo.concatenate %rows, %columns, dim = 0 : (tensor<2xi32>, tensor<2xi32>) -> tensor<4xi32>
    %pairs = stablehlo.reshape %padding : (tensor<4xi32>) -> tensor<2x2xi32>
    %size = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
    %window = stablehlo.concatenate %size, %c1, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
    %0 = stablehlo.custom_call @stablehlo.dynamic_reduce_window(%x, %zero, %window, %ones, %ones, %ones, %pairs) {api_version = 2 : i32, called_computations = [@sum]} : (tensor<?x3xf32>, tensor<f32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>, tensor<2x2xi32>) -> tensor<?x3xf32>
    return %0 : tensor<?x3xf32>
  }
  func.func @sum(%a: tensor<f32>, %b: tensor<f32>) -> tensor<f32> {
    %0 = stablehlo.add %a, %b : tensor<f32>
    return %0 : tensor<f32>
  }
}
