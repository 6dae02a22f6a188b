// RUN: alpa-opt %s --pipeline='import-hlo' --split-input-file | filecheck %s

// CHECK-LABEL: func.func public @moved_shards(
// CHECK-SAME: %[[X:.*]]: tensor<16x8xf32>)
// CHECK-NEXT: %[[A:.*]] = sdy.sharding_constraint %[[X]] <@mesh, [{"a", "b"}, {}]>
// CHECK-NEXT: %[[B:.*]] = sdy.sharding_constraint %[[A]] <@mesh, [{"a"}, {}]>
// CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[B]] <@mesh, [{"a"}, {"b"}]>
// CHECK-NEXT: return %[[C]]
module {
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @moved_shards(%x: tensor<16x8xf32>) -> tensor<16x8xf32> {
    %0 = sdy.reshard %x <@mesh, [{"a", "b"}, {}]> : tensor<16x8xf32>
    %1 = sdy.all_gather [{"b"}, {}] %0 out_sharding=<@mesh, [{"a"}, {}]> : tensor<16x8xf32>
    %2 = sdy.all_slice [{}, {"b"}] %1 out_sharding=<@mesh, [{"a"}, {"b"}]> : tensor<16x8xf32>
    return %2 : tensor<16x8xf32>
  }
}

// -----

// CHECK-LABEL: func.func public @named_computations(
// CHECK-SAME: %[[X:.*]]: tensor<16x8xf32>)
// CHECK-NEXT: %[[A:.*]] = sdy.sharding_constraint %[[X]] <@mesh, [{"a"}, {}]>
// CHECK-NEXT: %[[B:.*]] = stablehlo.tanh %[[A]]
// CHECK-NEXT: %[[C:.*]] = stablehlo.cosine %[[B]]
// CHECK-NEXT: %[[D:.*]] = sdy.sharding_constraint %[[C]] <@mesh, [{"b"}, {}]>
// CHECK-NEXT: return %[[D]]
module {
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @named_computations(%x: tensor<16x8xf32>) -> tensor<16x8xf32> {
    %0 = sdy.named_computation<"outer">(%x) in_shardings=[<@mesh, [{"a"}, {}]>] out_shardings=[<@mesh, [{"b"}, {}]>] (%y: tensor<16x8xf32>) {
      %1 = stablehlo.tanh %y : tensor<16x8xf32>
      %2 = sdy.named_computation<"inner">(%1) (%z: tensor<16x8xf32>) {
        %3 = stablehlo.cosine %z : tensor<16x8xf32>
        sdy.return %3 : tensor<16x8xf32>
      } : (tensor<16x8xf32>) -> tensor<16x8xf32>
      sdy.return %2 : tensor<16x8xf32>
    } : (tensor<16x8xf32>) -> tensor<16x8xf32>
    return %0 : tensor<16x8xf32>
  }
}
