// RUN: alpa-opt %s --pipeline='run-calls-on-shards' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x16xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
module {
  sdy.mesh @mesh_0 = <["a"=4]>
  func.func public @step(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=4]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x16xf32>) {
      mpmd.return %a : tensor<8x16xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=4]>
    func.func public @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
      // CHECK: %[[M:.*]] = sdy.manual_computation(%arg0) in_shardings=[<@mesh_0, [{"a"}, {}]>] out_shardings=[<@mesh_0, [{"a"}, {}]>] manual_axes={"a"} (%[[A:.*]]: tensor<2x16xf32>) {
      // CHECK-NEXT: %[[C:.*]] = stablehlo.custom_call @kernel(%[[A]]) : (tensor<2x16xf32>) -> tensor<2x16xf32>
      // CHECK-NEXT: sdy.return %[[C]]
      // CHECK: {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      %0 = stablehlo.custom_call @kernel(%x) {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>, sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=16}, custom>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      // No rule.
      // CHECK-NEXT: %[[D:.*]] = stablehlo.custom_call @kernel(%[[M]])
      %1 = stablehlo.custom_call @kernel(%0) {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      // Replicated.
      // CHECK-NEXT: %[[E:.*]] = stablehlo.custom_call @kernel(%[[D]])
      %2 = stablehlo.custom_call @kernel(%1) {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>]>, sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=16}, custom>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      // XLA asks jax for the program of a shard.
      // CHECK-NEXT: stablehlo.custom_call @CustomSPMDPartitioning(%[[E]])
      %3 = stablehlo.custom_call @CustomSPMDPartitioning(%2) {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>, sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=16}, custom>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      return %3 : tensor<8x16xf32>
    }
  }
}
