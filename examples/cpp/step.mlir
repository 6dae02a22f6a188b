// Two layers, applied to a batch of 128 samples.
func.func public @main(%batch: tensor<128x512xf32>, %first: tensor<512x512xf32>,
                       %second: tensor<512x512xf32>) -> tensor<128x512xf32> {
  %0 = stablehlo.dot_general %batch, %first, contracting_dims = [1] x [0]
    : (tensor<128x512xf32>, tensor<512x512xf32>) -> tensor<128x512xf32>
  %1 = stablehlo.tanh %0 : tensor<128x512xf32>
  %2 = stablehlo.dot_general %1, %second, contracting_dims = [1] x [0]
    : (tensor<128x512xf32>, tensor<512x512xf32>) -> tensor<128x512xf32>
  %3 = stablehlo.tanh %2 : tensor<128x512xf32>
  return %3 : tensor<128x512xf32>
}
