// RUN: alpa-opt %s --pipeline='write-reshard-steps' | filecheck %s

!x = !mpmd.mesh_tensor<"mesh_0", tensor<16x32x64xf32>, sharding=<@mesh_0, [{"x", "y"}, {}, {}]>>
!y = !mpmd.mesh_tensor<"mesh_0", tensor<16x32x64xf32>, sharding=<@mesh_0, [{}, {"x"}, {"y"}]>>
module {
  sdy.mesh @mesh_0 = <["x"=2, "y"=4]>
  func.func public @step(%x: !x) -> !y attributes {topology = #mpmd.topology<<"mesh_0" : <["x"=2, "y"=4]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<16x32x64xf32>) {
      mpmd.return %a : tensor<16x32x64xf32>
    } : (!x) -> !y
    return %0 : !y
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["x"=2, "y"=4]>
    func.func public @main(%x: tensor<16x32x64xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"x", "y"}, {}, {}]>})
        -> (tensor<16x32x64xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {"x"}, {"y"}]>}) {
      // Two exchanges from an argument.
      // CHECK: %[[A:.*]] = sdy.sharding_constraint %arg0 <@mesh_0, [{"x"}, {}, {"y"}]>
      // CHECK-NEXT: %[[B:.*]] = sdy.sharding_constraint %[[A]] <@mesh_0, [{}, {"x"}, {"y"}]>
      %0 = sdy.sharding_constraint %x <@mesh_0, [{}, {"x"}, {"y"}]> : tensor<16x32x64xf32>
      // One gather from a constraint.
      // CHECK-NEXT: %[[C:.*]] = sdy.sharding_constraint %[[B]] <@mesh_0, [{}, {}, {"y"}]>
      // CHECK-NEXT: %[[T:.*]] = stablehlo.tanh %[[C]]
      %1 = sdy.sharding_constraint %0 <@mesh_0, [{}, {}, {"y"}]> : tensor<16x32x64xf32>
      %2 = stablehlo.tanh %1 : tensor<16x32x64xf32>
      // Nothing fixes the sharding of the operand.
      // CHECK-NEXT: sdy.sharding_constraint %[[T]] <@mesh_0, [{}, {"x"}, {"y"}]>
      // CHECK-NEXT: return
      %3 = sdy.sharding_constraint %2 <@mesh_0, [{}, {"x"}, {"y"}]> : tensor<16x32x64xf32>
      return %3 : tensor<16x32x64xf32>
    }
  }
}
