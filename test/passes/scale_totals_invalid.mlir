// RUN: alpa-opt %s --verify-diagnostics --pipeline='scale-totals'

!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @step(%g: !w) -> !w attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g) {alpa.module = @m, alpa.part = "update"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    return %0 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    // expected-error @+1 {{alpa.total is "max"; expected one of mean, sum, gradient}}
    func.func public @main(%g: tensor<8xf32> {alpa.total = "max", sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      return %g : tensor<8xf32>
    }
  }
}
