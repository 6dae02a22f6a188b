// RUN: alpa-opt %s --split-input-file --verify-diagnostics --pipeline='strip-sdy'

module {
  sdy.mesh @mesh = <["a"=2]>
  func.func public @collective(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}]>] out_shardings=[<@mesh, [{"a"}]>] manual_axes={"a"} (%s: tensor<2xf32>) {
      // expected-error @+1 {{stablehlo.collective_permute in a manual computation of 2 devices; without Shardy the program is that of one}}
      %1 = "stablehlo.collective_permute"(%s) <{source_target_pairs = dense<[[0, 1], [1, 0]]> : tensor<2x2xi64>}> : (tensor<2xf32>) -> tensor<2xf32>
      sdy.return %1 : tensor<2xf32>
    } : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

module {
  sdy.mesh @mesh = <["a"=2]>
  func.func public @device_number(%x: tensor<4xf32>) -> tensor<2xui32> {
    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"a"}]>] out_shardings=[<@mesh, [{"a"}]>] manual_axes={"a"} (%s: tensor<2xf32>) {
      // expected-error @+1 {{stablehlo.partition_id in a manual computation of 2 devices}}
      %1 = stablehlo.partition_id : tensor<ui32>
      %2 = stablehlo.reshape %1 : (tensor<ui32>) -> tensor<1xui32>
      sdy.return %2 : tensor<1xui32>
    } : (tensor<4xf32>) -> tensor<2xui32>
    return %0 : tensor<2xui32>
  }
}

// -----

module {
  sdy.mesh @mesh = <["a"=2]>
  func.func public @open_sum(%x: tensor<4xf32>) -> tensor<4xf32> {
    // expected-error @+1 {{sdy.all_reduce needs the devices of its mesh}}
    %0 = sdy.all_reduce {"a"} %x out_sharding=<@mesh, [{}]> : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}

// -----

!x = !mpmd.mesh_tensor<"m", tensor<4xf32>>
// expected-error @+1 {{argument 0 is on m: this program has been cut into stages already}}
func.func @plan(%x: !x) -> !x attributes {topology = #mpmd.topology<<"m" : <["a"=2]>>>} {
  %0 = mpmd.fragment<mesh="m", origin=["layer_0"]> (%x) (%y: tensor<4xf32>) {
    mpmd.return %y : tensor<4xf32>
  } : (!x) -> !x
  return %0 : !x
}
