// RUN: alpa-opt %s --split-input-file --pipeline='strip-sdy' | filecheck %s

// CHECK-LABEL: func.func public @placements(
// CHECK-SAME: %[[X:.*]]: tensor<8x4xf32> {tf.aliasing_output = 0 : i32}) -> (tensor<8x4xf32> {jax.result_info = "x"}) {
// CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[X]] : tensor<8x4xf32>
// CHECK-NEXT: return %[[T]]
module {
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @placements(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>, tf.aliasing_output = 0 : i32}) -> (tensor<8x4xf32> {jax.result_info = "x", sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {}]>}) {
    %0 = sdy.sharding_constraint %x <@mesh, [{}, {"b"}]> : tensor<8x4xf32>
    %1 = stablehlo.tanh %0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {"b"}]>]>} : tensor<8x4xf32>
    %2 = sdy.reshard %1 <@mesh, [{"a"}, {}]> : tensor<8x4xf32>
    sdy.sharding_group %2 group_id=0 : tensor<8x4xf32>
    %3 = sdy.propagation_barrier %2 allowed_direction=NONE : tensor<8x4xf32>
    return %3 : tensor<8x4xf32>
  }
}

// -----

// The body runs for each of the four devices. Its result is cut by both axes along dimension 0, the
// minor one first; dimension 1 of the operand is cut by "a", and the second operand by "b" alone.
// CHECK-LABEL: func.func public @two_axes(
// CHECK-SAME: %[[X:.*]]: tensor<8x4xf32>, %[[Y:.*]]: tensor<4x2xf32>)
// CHECK: %[[A:.*]] = stablehlo.slice %[[X]] [0:8, 0:2]
// CHECK: %[[B:.*]] = stablehlo.slice %[[Y]] [0:2, 0:2]
// CHECK: %[[P:.*]] = stablehlo.dot_general %[[A]], %[[B]]
// CHECK: stablehlo.slice %[[X]] [0:8, 0:2]
// CHECK: stablehlo.slice %[[Y]] [2:4, 0:2]
// CHECK: %[[Q:.*]] = stablehlo.dot_general
// CHECK: stablehlo.slice %[[X]] [0:8, 2:4]
// CHECK: stablehlo.slice %[[Y]] [0:2, 0:2]
// CHECK: %[[R:.*]] = stablehlo.dot_general
// CHECK: stablehlo.slice %[[X]] [0:8, 2:4]
// CHECK: stablehlo.slice %[[Y]] [2:4, 0:2]
// CHECK: %[[S:.*]] = stablehlo.dot_general
// CHECK: stablehlo.concatenate %[[P]], %[[R]], %[[Q]], %[[S]], dim = 0
module {
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @two_axes(%x: tensor<8x4xf32>, %y: tensor<4x2xf32>) -> tensor<32x2xf32> {
    %0 = sdy.manual_computation(%x, %y) in_shardings=[<@mesh, [{}, {"a"}]>, <@mesh, [{"b"}, {}]>] out_shardings=[<@mesh, [{"b", "a"}, {}]>] manual_axes={"a", "b"} (%s: tensor<8x2xf32>, %t: tensor<2x2xf32>) {
      %1 = stablehlo.dot_general %s, %t, contracting_dims = [1] x [0] : (tensor<8x2xf32>, tensor<2x2xf32>) -> tensor<8x2xf32>
      sdy.return %1 : tensor<8x2xf32>
    } : (tensor<8x4xf32>, tensor<4x2xf32>) -> tensor<32x2xf32>
    return %0 : tensor<32x2xf32>
  }
}

// -----

// On one device, collectives give what they are given, and the device is number 0.
// CHECK-LABEL: func.func public @one_device(
// CHECK-SAME: %[[X:.*]]: tensor<4xf32>)
// CHECK-NOT: all_reduce
// CHECK: %[[N:.*]] = stablehlo.constant dense<0> : tensor<ui32>
// CHECK: return %[[X]], %[[N]]
module {
  sdy.mesh @mesh = <["a"=1]>
  func.func public @one_device(%x: tensor<4xf32>) -> (tensor<4xf32>, tensor<ui32>) {
    %0:2 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}]>] out_shardings=[<@mesh, [{"a"}]>, <@mesh, []>] manual_axes={"a"} (%s: tensor<4xf32>) {
      %1 = "stablehlo.all_reduce"(%s) <{replica_groups = dense<0> : tensor<1x1xi64>}> ({
      ^bb0(%l: tensor<f32>, %r: tensor<f32>):
        %3 = stablehlo.add %l, %r : tensor<f32>
        stablehlo.return %3 : tensor<f32>
      }) : (tensor<4xf32>) -> tensor<4xf32>
      %2 = stablehlo.partition_id : tensor<ui32>
      sdy.return %1, %2 : tensor<4xf32>, tensor<ui32>
    } : (tensor<4xf32>) -> (tensor<4xf32>, tensor<ui32>)
    return %0#0, %0#1 : tensor<4xf32>, tensor<ui32>
  }
}

// -----

// Rules that a program brings along go, too.
// CHECK-LABEL: func.func public @rules_and_constants(
// CHECK-NEXT: %[[C:.*]] = stablehlo.constant dense<1.000000e+00> : tensor<4xf32>
// CHECK-NEXT: %[[Y:.*]] = stablehlo.custom_call @foo(%[[C]]) : (tensor<4xf32>) -> tensor<4xf32>
// CHECK-NEXT: return %[[Y]]
func.func public @rules_and_constants() -> tensor<4xf32> {
  %0 = sdy.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.custom_call @foo(%0) {sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([i]) {i=4}, custom>} : (tensor<4xf32>) -> tensor<4xf32>
  return %1 : tensor<4xf32>
}
