"""Copies that convolutions need on GPUs, in arrays of JAX's and of PyTorch's order."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse, stablehlo
from alpa.passes.cost.cluster import Cluster
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.passes.sharding.convolution_layouts import argument_of, is_copied, is_transposed

LAST = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
FIRST = "[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]"


def copied(numbers: str, pad: str, types: tuple[str, str, str], gpu: str) -> tuple[bool, ...]:
    """Whether a convolution's input, kernel and result are copied."""
    x, k, y = types
    module = parse(f"""
    func.func public @main(%x: tensor<{x}>, %k: tensor<{k}>) -> tensor<{y}> {{
      %0 = stablehlo.convolution(%x, %k) dim_numbers = {numbers}, window = {{pad = {pad}}}
        {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}
        : (tensor<{x}>, tensor<{k}>) -> tensor<{y}>
      return %0 : tensor<{y}>
    }}""")
    op = body(main_function(module)).operations[0]
    assert isinstance(op, stablehlo.ConvolutionOp)
    device = Cluster.parse(f"{gpu}:1x1").device
    return is_copied(op, 0, device), is_copied(op, 1, device), is_transposed(op, device)


@pytest.mark.parametrize(
    ("numbers", "dtype", "gpu", "expected"),
    [
        # Channels are last where matrix units compute the type. JAX's kernels are never in order.
        (LAST, "f32", "v100-16gb", (True, True, True)),
        (LAST, "f16", "v100-16gb", (False, True, False)),
        (LAST, "f32", "h100", (False, True, False)),
        (FIRST, "f32", "v100-16gb", (False, False, False)),
        (FIRST, "bf16", "a100-40gb", (True, True, True)),
    ],
)
def test_the_order_of_dimensions(
    numbers: str, dtype: str, gpu: str, expected: tuple[bool, bool, bool]
) -> None:
    shapes = ("8x16x16x4", "3x3x4x6", "8x16x16x6")
    if numbers == FIRST:
        shapes = ("8x4x16x16", "6x4x3x3", "8x6x16x16")
    x, k, y = (f"{shape}x{dtype}" for shape in shapes)
    assert copied(numbers, "[[1, 1], [1, 1]]", (x, k, y), gpu) == expected


def test_dimensions_of_size_1_lie_anywhere() -> None:
    """A kernel of one tap is a matrix, which the forward part reads transposed."""
    x, k, y = ("8x16x16x4xf32", "1x1x4x6xf32", "8x16x16x6xf32")
    assert copied(LAST, "[[0, 0], [0, 0]]", (x, k, y), "h100") == (False, True, False)
    # The gradient of its input reads it as it is, and that of the kernel is transposed.
    swapped = LAST.replace("i, o", "o, i")
    assert copied(swapped, "[[0, 0], [0, 0]]", (y, k, x), "h100") == (False, False, False)
    gradient = "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]"
    assert copied(gradient, "[[0, 0], [0, 0]]", (x, y, k), "h100") == (False, False, True)


def test_a_reversed_kernel_is_read_as_the_argument_that_it_is() -> None:
    module = parse("""
    func.func public @main(%x: tensor<8x16x16x6xf32>, %k: tensor<3x3x4x6xf32>)
        -> tensor<8x16x16x4xf32> {
      %0 = stablehlo.reverse %k, dims = [0, 1] : tensor<3x3x4x6xf32>
      %1 = stablehlo.convolution(%x, %0) dim_numbers = [b, 0, 1, f]x[0, 1, o, i]->[b, 0, 1, f],
        window = {pad = [[1, 1], [1, 1]]}
        {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
        : (tensor<8x16x16x6xf32>, tensor<3x3x4x6xf32>) -> tensor<8x16x16x4xf32>
      %2 = stablehlo.negate %k : tensor<3x3x4x6xf32>
      %3 = stablehlo.convolution(%x, %2) dim_numbers = [b, 0, 1, f]x[0, 1, o, i]->[b, 0, 1, f],
        window = {pad = [[1, 1], [1, 1]]}
        {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
        : (tensor<8x16x16x6xf32>, tensor<3x3x4x6xf32>) -> tensor<8x16x16x4xf32>
      return %1 : tensor<8x16x16x4xf32>
    }""")
    block = body(main_function(module))
    _, reversing, _, other, _ = block.operations
    assert isinstance(reversing, stablehlo.ConvolutionOp)
    assert isinstance(other, stablehlo.ConvolutionOp)
    assert argument_of(reversing, 1) == block.arguments[1]
    assert argument_of(reversing, 0) == block.arguments[0]
    assert argument_of(other, 1) is None
    assert is_copied(reversing, 1, Cluster.parse("h100:1x1").device)


def test_uneven_padding_is_a_copy() -> None:
    types = ("8x16x16x4xf32", "2x2x4x6xf32", "8x16x16x6xf32")
    assert copied(LAST, "[[0, 1], [0, 1]]", types, "h100") == (True, True, False)


MODULE = """
sdy.mesh @mesh_0 = <["x"=1]>
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x16x16x4xf32>>
!d = !mpmd.mesh_tensor<"mesh_0", tensor<8x16x16x6xf32>>
!g = !mpmd.mesh_tensor<"mesh_0", tensor<3x3x4x6xf32>>
func.func public @main(%x: !x, %d: !d) -> !g attributes {
    topology = #mpmd.topology<<"mesh_0" : <["x"=1]>>>,
    alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>,
                    logical_shape = array<i64: 1>}],
    alpa.plan = {num_micro_batches = 2 : i64, schedule = "gpipe", cluster = "CLUSTER",
      predicted_step_seconds = 1.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
  %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %d)
      {alpa.part = "backward", alpa.accumulators = array<i64: 0>}
      (%a: tensor<8x16x16x4xf32>, %b: tensor<8x16x16x6xf32>) {
    %0 = stablehlo.convolution(%a, %b) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f],
      window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
      : (tensor<8x16x16x4xf32>, tensor<8x16x16x6xf32>) -> tensor<3x3x4x6xf32>
    mpmd.return %0 : tensor<3x3x4x6xf32>
  } : (!x, !d) -> !g
  return %g : !g
}
"""


def temporaries(cluster: str) -> int:
    (memory,) = predicted_memory(parse(MODULE.replace("CLUSTER", cluster)))
    return memory.temporaries


def test_the_gradient_of_a_kernel_is_transposed_beside_its_accumulator() -> None:
    x, d, g = 8 * 16 * 16 * 4 * 4, 8 * 16 * 16 * 6 * 4, 3 * 3 * 4 * 6 * 4
    assert temporaries("cpu:1x1") == g
    assert temporaries("h100:1x1") == 2 * g
    assert temporaries("v100-16gb:1x1") == x + d + g
