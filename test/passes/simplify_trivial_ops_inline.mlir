// RUN: alpa-opt %s --pipeline='simplify-trivial-ops' --split-input-file | filecheck %s

// CHECK-LABEL: func.func public @one_call
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: return %[[T]]
// CHECK-NOT: @tanh
func.func public @one_call(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @tanh(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @tanh(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @nested_and_several
// CHECK-NEXT: %[[A:.*]] = stablehlo.sine %arg0
// CHECK-NEXT: %[[B:.*]] = stablehlo.multiply %[[A]], %arg1
// CHECK-NEXT: %[[C:.*]] = stablehlo.sine %[[B]]
// CHECK-NEXT: %[[D:.*]] = stablehlo.multiply %[[C]], %arg0
// CHECK-NEXT: return %[[D]], %[[C]]
func.func @nested_and_several(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0:2 = call @outer(%x, %y) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  %1:2 = call @outer(%0#0, %x) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %1#0, %1#1 : tensor<4xf32>, tensor<4xf32>
}
func.func private @outer(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0 = call @inner(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.multiply %0, %y : tensor<4xf32>
  return %1, %0 : tensor<4xf32>, tensor<4xf32>
}
func.func private @inner(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.sine %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @argument_returned
// CHECK-NEXT: return %arg1, %arg0
func.func @argument_returned(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %0:2 = call @swap(%x, %y) : (tensor<4xf32>, tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>)
  return %0#0, %0#1 : tensor<4xf32>, tensor<4xf32>
}
func.func private @swap(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  return %y, %x : tensor<4xf32>, tensor<4xf32>
}

// -----

// The callee's argument is captured by a branch inside.
// CHECK-LABEL: @in_regions
// CHECK: "stablehlo.if"
// CHECK-NEXT: %[[A:.*]] = stablehlo.add %arg0, %arg1
// CHECK-NEXT: stablehlo.return %[[A]]
// CHECK: stablehlo.return %arg1
// CHECK-NOT: call
func.func @in_regions(%x: tensor<4xf32>, %y: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {
  %0 = func.call @branch(%x, %y, %p) : (tensor<4xf32>, tensor<4xf32>, tensor<i1>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @branch(%x: tensor<4xf32>, %y: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {
  %0 = "stablehlo.if"(%p) ({
    %1 = func.call @add(%x, %y) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %1 : tensor<4xf32>
  }, {
    stablehlo.return %y : tensor<4xf32>
  }) : (tensor<i1>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @add(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// CHECK-LABEL: @in_a_reduction
// CHECK: applies stablehlo.maximum across dimensions = [0]
func.func @in_a_reduction(%x: tensor<4xf32>, %init: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.reduce(%x init: %init) across dimensions = [0] : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    reducer(%a: tensor<f32>, %b: tensor<f32>) {
      %1 = func.call @max(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }
  return %0 : tensor<f32>
}
func.func private @max(%x: tensor<f32>, %y: tensor<f32>) -> tensor<f32> {
  %0 = stablehlo.maximum %x, %y : tensor<f32>
  return %0 : tensor<f32>
}

// -----

// A composite is a call of its decomposition.
// CHECK-LABEL: @composite
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: return %[[T]]
func.func @composite(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.composite "my.gelu" %x {decomposition = @gelu, version = 1 : i32} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @gelu(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// A custom call names a function: it stays, with its own calls inlined; the unused one goes.
// CHECK-LABEL: @referenced_function_stays
// CHECK: called_computations = [@body]
// CHECK: func.func private @body
// CHECK-NEXT: stablehlo.tanh
// CHECK-NOT: @tanh
// CHECK-NOT: @unused
func.func @referenced_function_stays(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @kernel(%x) {called_computations = [@body]} : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @body(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @tanh(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @tanh(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @unused(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}

// -----

// CHECK-LABEL: @sharding_of_a_signature
// CHECK-NEXT: %[[A:.*]] = sdy.sharding_constraint %arg0 <@mesh, [{"a"}]>
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[A]]
// CHECK-NEXT: %[[R:.*]] = sdy.sharding_constraint %[[T]] <@mesh, [{}]>
// CHECK-NEXT: return %[[R]]
sdy.mesh @mesh = <["a"=2]>
func.func @sharding_of_a_signature(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @tanh(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func private @tanh(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>})
    -> (tensor<4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}]>}) {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}

// -----

// What never runs need not be inlined; a loop that runs once is its body, with the calls in it.
// CHECK-LABEL: @loops_of_known_trips
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %arg0
// CHECK-NEXT: return %[[T]]
// CHECK-NOT: func.func
func.func @loops_of_known_trips(%x: tensor<4xf32>) -> tensor<4xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %1:2 = stablehlo.while(%k = %one, %b = %a) : tensor<i32>, tensor<4xf32>
        cond {
          %c = stablehlo.compare LT, %k, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        } do {
          %t = func.call @without_body(%b) : (tensor<4xf32>) -> tensor<4xf32>
          %l = stablehlo.add %k, %one : tensor<i32>
          stablehlo.return %l, %t : tensor<i32>, tensor<4xf32>
        }
      %t = func.call @once(%1#1) : (tensor<4xf32>) -> tensor<4xf32>
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %t : tensor<i32>, tensor<4xf32>
    }
  return %0#1 : tensor<4xf32>
}
func.func private @without_body(tensor<4xf32>) -> tensor<4xf32>
func.func private @once(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
