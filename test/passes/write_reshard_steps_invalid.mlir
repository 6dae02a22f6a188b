// RUN: alpa-opt %s --verify-diagnostics --pipeline='write-reshard-steps'

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
module {
  func.func public @step(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=4]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x8xf32>) {
      mpmd.return %a : tensor<8x8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=4]>
    func.func public @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}]>}) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}]>}) {
      // expected-error @+1 {{a sharding over a part of axis a on @mesh_0, which has the axes a to be used whole}}
      %0 = sdy.sharding_constraint %x <@mesh_0, [{"a":(1)2}, {}]> : tensor<8x8xf32>
      return %0 : tensor<8x8xf32>
    }
  }
}
