// RUN: alpa-opt %s --pipeline='import-hlo' --split-input-file | filecheck %s

// CHECK-LABEL: func.func public @tuple_of_results(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>) -> (tensor<4xf32> {jax.result_info = "other"}, tensor<4xf32>, tensor<4xf32>)
// CHECK-NEXT: %[[Y:.*]] = stablehlo.negate %[[X]]
// CHECK-NEXT: return %[[Y]], %[[X]], %[[Y]]
func.func public @tuple_of_results(%x: tensor<4xf32>) -> (tensor<4xf32> {jax.result_info = "other"}, tuple<tensor<4xf32>, tensor<4xf32>> {jax.result_info = "pair"}) {
  %y = stablehlo.negate %x : tensor<4xf32>
  %t = stablehlo.tuple %x, %y : tuple<tensor<4xf32>, tensor<4xf32>>
  return %y, %t : tensor<4xf32>, tuple<tensor<4xf32>, tensor<4xf32>>
}

// -----

// CHECK-LABEL: func.func public @tuple_of_arguments(
// CHECK-SAME: %[[A:.*]]: tensor<2xf32>, %[[B:.*]]: tensor<4xf32>, %[[C:.*]]: tensor<4xi32>, %[[D:.*]]: tensor<4xf32> {jax.buffer_donor = true}) -> (tensor<4xf32>, tensor<4xi32>)
// CHECK-NEXT: %[[S:.*]] = stablehlo.add %[[B]], %[[D]]
// CHECK-NEXT: return %[[S]], %[[C]]
func.func public @tuple_of_arguments(%t: tuple<tensor<2xf32>, tuple<tensor<4xf32>, tensor<4xi32>>>, %d: tensor<4xf32> {jax.buffer_donor = true}) -> (tensor<4xf32>, tensor<4xi32>) {
  %u = stablehlo.get_tuple_element %t[1] : (tuple<tensor<2xf32>, tuple<tensor<4xf32>, tensor<4xi32>>>) -> tuple<tensor<4xf32>, tensor<4xi32>>
  %b = stablehlo.get_tuple_element %u[0] : (tuple<tensor<4xf32>, tensor<4xi32>>) -> tensor<4xf32>
  %c = stablehlo.get_tuple_element %u[1] : (tuple<tensor<4xf32>, tensor<4xi32>>) -> tensor<4xi32>
  %s = stablehlo.add %b, %d : tensor<4xf32>
  return %s, %c : tensor<4xf32>, tensor<4xi32>
}

// -----

// CHECK-LABEL: func.func private @callee(
// CHECK-SAME: %[[P:.*]]: tensor<4xf32>, %[[Q:.*]]: tensor<2xf32>) -> (tensor<2xf32>, tensor<4xf32>)
// CHECK-NEXT: return %[[Q]], %[[P]]
func.func private @callee(%t: tuple<tensor<4xf32>, tensor<2xf32>>) -> tuple<tensor<2xf32>, tensor<4xf32>> {
  %p = stablehlo.get_tuple_element %t[0] : (tuple<tensor<4xf32>, tensor<2xf32>>) -> tensor<4xf32>
  %q = stablehlo.get_tuple_element %t[1] : (tuple<tensor<4xf32>, tensor<2xf32>>) -> tensor<2xf32>
  %u = stablehlo.tuple %q, %p : tuple<tensor<2xf32>, tensor<4xf32>>
  return %u : tuple<tensor<2xf32>, tensor<4xf32>>
}
// CHECK-LABEL: func.func public @tuples_through_calls(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>, %[[Y:.*]]: tensor<2xf32>)
// CHECK-NEXT: %[[R:.*]]:2 = call @callee(%[[X]], %[[Y]])
// CHECK-NEXT: %[[C:.*]]:2 = stablehlo.composite "made.up" %[[R]]#1, %[[R]]#0 {decomposition = @callee}
// CHECK-NEXT: return %[[C]]#0, %[[R]]#1
func.func public @tuples_through_calls(%x: tensor<4xf32>, %y: tensor<2xf32>) -> (tensor<2xf32>, tensor<4xf32>) {
  %t = stablehlo.tuple %x, %y : tuple<tensor<4xf32>, tensor<2xf32>>
  %r = call @callee(%t) : (tuple<tensor<4xf32>, tensor<2xf32>>) -> tuple<tensor<2xf32>, tensor<4xf32>>
  %r0 = stablehlo.get_tuple_element %r[0] : (tuple<tensor<2xf32>, tensor<4xf32>>) -> tensor<2xf32>
  %r1 = stablehlo.get_tuple_element %r[1] : (tuple<tensor<2xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %s = stablehlo.tuple %r1, %r0 : tuple<tensor<4xf32>, tensor<2xf32>>
  %c = stablehlo.composite "made.up" %s {decomposition = @callee} : (tuple<tensor<4xf32>, tensor<2xf32>>) -> tuple<tensor<2xf32>, tensor<4xf32>>
  %c0 = stablehlo.get_tuple_element %c[0] : (tuple<tensor<2xf32>, tensor<4xf32>>) -> tensor<2xf32>
  return %c0, %r1 : tensor<2xf32>, tensor<4xf32>
}

// -----

// CHECK-LABEL: func.func public @custom_call_in_a_branch(
// CHECK: "stablehlo.case"
// CHECK-NEXT: %[[V:.*]]:2 = stablehlo.custom_call @Eigh(%{{.*}}) : (tensor<4x4xf32>) -> (tensor<4xf32>, tensor<4x4xf32>)
// CHECK-NEXT: stablehlo.return %[[V]]#1 : tensor<4x4xf32>
func.func public @custom_call_in_a_branch(%x: tensor<4x4xf32>, %i: tensor<i32>) -> tensor<4x4xf32> {
  %r = "stablehlo.case"(%i) ({
    %v = stablehlo.custom_call @Eigh(%x) : (tensor<4x4xf32>) -> tuple<tensor<4xf32>, tensor<4x4xf32>>
    %e = stablehlo.get_tuple_element %v[1] : (tuple<tensor<4xf32>, tensor<4x4xf32>>) -> tensor<4x4xf32>
    stablehlo.return %e : tensor<4x4xf32>
  }, {
    stablehlo.return %x : tensor<4x4xf32>
  }) : (tensor<i32>) -> tensor<4x4xf32>
  return %r : tensor<4x4xf32>
}

// -----

// CHECK-LABEL: module
// CHECK-NOT: input_output_alias
// CHECK: func.func public @aliases(%arg0: tensor<4xf32> {tf.aliasing_output = 1 : i32}, %arg1: tensor<8xf32>, %arg2: tensor<2xf32> {mhlo.sharding = "{replicated}", tf.aliasing_output = 0 : i32})
module attributes {mhlo.input_output_alias = [
    {alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64: 1>},
    {alias = {kind = "must_alias", parameter_index = array<i64>, parameter_number = 2 : i64}, output_index = array<i64: 0>},
    {alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 1 : i64}, output_index = array<i64: 2>}]} {
  func.func public @aliases(%w: tensor<4xf32>, %other: tensor<8xf32>, %v: tensor<2xf32> {mhlo.sharding = "{replicated}"}) -> (tensor<2xf32>, tensor<4xf32>, tensor<8xi32>) {
    %i = stablehlo.convert %other : (tensor<8xf32>) -> tensor<8xi32>
    return %v, %w, %i : tensor<2xf32>, tensor<4xf32>, tensor<8xi32>
  }
}

// -----

// CHECK-LABEL: func.func public @alias_of_the_only_result(%arg0: tensor<4xf32> {tf.aliasing_output = 0 : i32})
module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64>}]} {
  func.func public @alias_of_the_only_result(%w: tensor<4xf32>) -> tensor<4xf32> {
    return %w : tensor<4xf32>
  }
}

// -----

// CHECK-LABEL: func.func public @aliases_inside_tuples(%arg0: tensor<2xf32>, %arg1: tensor<4xf32> {tf.aliasing_output = 1 : i32}) -> (tensor<2xf32>, tensor<4xf32>)
module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64: 1>, parameter_number = 0 : i64}, output_index = array<i64: 1>}]} {
  func.func public @aliases_inside_tuples(%t: tuple<tensor<2xf32>, tensor<4xf32>>) -> tuple<tensor<2xf32>, tensor<4xf32>> {
    return %t : tuple<tensor<2xf32>, tensor<4xf32>>
  }
}

// -----

// Arguments that say themselves what is donated are believed.
// CHECK-LABEL: func.func public @donated(%arg0: tensor<4xf32>, %arg1: tensor<4xf32> {tf.aliasing_output = 0 : i32})
module attributes {mhlo.input_output_alias = [{alias = {kind = "may_alias", parameter_index = array<i64>, parameter_number = 0 : i64}, output_index = array<i64>}]} {
  func.func public @donated(%w: tensor<4xf32>, %v: tensor<4xf32> {tf.aliasing_output = 0 : i32}) -> tensor<4xf32> {
    %0 = stablehlo.add %w, %v : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

// JAX leaves the function that a custom call computes with public.
// CHECK-LABEL: func.func private @greater
// CHECK: func.func public @program
func.func @greater(%a: tensor<f32>, %b: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>) -> tensor<i1> {
  %0 = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
  return %0 : tensor<i1>
}
func.func public @program(%x: tensor<8xf32>, %i: tensor<8xi32>, %low: tensor<f32>, %none: tensor<i32>) -> (tensor<2xf32>, tensor<2xi32>) {
  %0:2 = stablehlo.custom_call @ApproxTopK(%x, %i, %low, %none) {called_computations = [@greater]} : (tensor<8xf32>, tensor<8xi32>, tensor<f32>, tensor<i32>) -> (tensor<2xf32>, tensor<2xi32>)
  return %0#0, %0#1 : tensor<2xf32>, tensor<2xi32>
}
