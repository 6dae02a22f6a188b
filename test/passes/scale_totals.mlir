// RUN: alpa-opt %s --pipeline='scale-totals' | filecheck %s

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
!s = !mpmd.mesh_tensor<"mesh_0", tensor<f32>>
!i = !mpmd.mesh_tensor<"mesh_0", tensor<8xi32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @step(%g: !w, %mean: !s, %sum: !s, %i: !i) -> !w attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe", predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g, %mean, %sum, %i) {alpa.module = @m, alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<f32>, %c: tensor<f32>, %d: tensor<8xi32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !s, !s, !i) -> !w
    return %0 : !w
  }
  // CHECK: module @m {
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // The marks are gone.
    // CHECK: func.func public @main(%[[G:.*]]: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}, %[[M:.*]]: tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}, %[[S:.*]]: tensor<f32> {sdy.sharding = #sdy.sharding<@mesh_0, []>}, %[[I:.*]]: tensor<8xi32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
    // A gradient is scaled where it lies.
    // CHECK-NEXT: %[[C:.*]] = stablehlo.constant dense<2.500000e-01> : tensor<8xf32>
    // CHECK-NEXT: %[[P:.*]] = stablehlo.multiply %[[G]], %[[C]]
    // CHECK-NEXT: %[[GC:.*]] = sdy.sharding_constraint %[[P]] <@mesh_0, [{"a"}]>
    // CHECK-NEXT: %[[D:.*]] = stablehlo.constant dense<2.500000e-01> : tensor<f32>
    // CHECK-NEXT: %[[Q:.*]] = stablehlo.multiply %[[M]], %[[D]]
    // CHECK-NEXT: stablehlo.custom_call @update(%[[GC]], %[[Q]], %[[S]], %[[I]])
    func.func public @main(
        %g: tensor<8xf32> {alpa.total = "gradient", sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>},
        %mean: tensor<f32> {alpa.total = "mean", sdy.sharding = #sdy.sharding<@mesh_0, []>},
        %sum: tensor<f32> {alpa.total = "sum", sdy.sharding = #sdy.sharding<@mesh_0, []>},
        %i: tensor<8xi32> {alpa.total = "gradient", sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
        -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}) {
      %0 = stablehlo.custom_call @update(%g, %mean, %sum, %i) : (tensor<8xf32>, tensor<f32>, tensor<f32>, tensor<8xi32>) -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }
  }
}
