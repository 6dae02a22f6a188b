// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='lower-partial-sums'

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @not_linear(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
      // expected-error @+1 {{stablehlo.tanh cannot leave its result unreduced over a; plan this value as a replica or as a shard}}
      %0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}], unreduced={"a"}>]>} : tensor<8xf32>
      return %0 : tensor<8xf32>
    }
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @not_outlined(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    // expected-error @+1 {{the fragment has no module; run outline-fragments first}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}

// -----

!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
module {
  func.func public @another_mesh(%x: !x) -> !x attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
    // expected-error @+1 {{module @m needs one public function and the mesh @mesh_0; it has 0 and the meshes mesh_1}}
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
  module @m {
    sdy.mesh @mesh_1 = <["a"=2]>
  }
}
