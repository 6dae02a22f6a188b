// RUN: alpa-opt %s --pipeline='stage-mesh-partition{cluster=cpu:1x2 num-stages=4 num-micro-batches=3 schedule=interleaved-1f1b}' --split-input-file --verify-diagnostics

// expected-error @+1 {{interleaved-1f1b has 2 stages on each of several equal meshes: interleaved-1f1b runs micro-batches in groups of 2, the meshes, and 3 is no multiple of that; take 4 micro-batches}}
func.func public @micro_batches_in_groups(
    %w0: tensor<64x64xf32> {alpa.role = "constant"}, %w1: tensor<64x64xf32> {alpa.role = "constant"},
    %x: tensor<64x64xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<64x64xf32> {alpa.result = "concat:0"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x, %w0) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = mpmd.named_computation<"layer_1"> (%0, %w1) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %2 = mpmd.named_computation<"layer_2"> (%1, %w1) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %3 = mpmd.named_computation<"layer_3"> (%2, %w0) (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
    %4 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
    mpmd.return %4 : tensor<64x64xf32>
  } : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %3 : tensor<64x64xf32>
}

// -----

// expected-error @+1 {{interleaved-1f1b has 2 stages on each of several equal meshes: 4 stages need as many layers, and the program has 1; use other numbers, more layers (num-layers), or 1f1b}}
func.func public @fewer_layers_than_stages(%x: tensor<4xf32> {alpa.role = "constant"}) -> (tensor<4xf32> {alpa.result = "last"}) {
  %0 = mpmd.named_computation<"layer_0"> (%x) (%a: tensor<4xf32>) {
    mpmd.return %a : tensor<4xf32>
  } : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}
