from __future__ import annotations

import pytest

import alpa.passes
from alpa.dialects import parse
from alpa.passes.cost.cluster import Cluster
from alpa.passes.plan.reader import read_planned

SIZE = 2048
STEP = f"""
func.func public @main(
    %w: tensor<{SIZE}x{SIZE}xf32> {{alpa.role = "state", tf.aliasing_output = 0 : i32}},
    %x: tensor<8x{SIZE}xf32> {{alpa.role = "batch", alpa.batch_dim = 0 : i64}})
    -> (tensor<{SIZE}x{SIZE}xf32> {{alpa.result = "state:0"}}) {{
  %h = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x{SIZE}xf32>, tensor<{SIZE}x{SIZE}xf32>) -> tensor<8x{SIZE}xf32>
  %t = stablehlo.tanh %h : tensor<8x{SIZE}xf32>
  %d = stablehlo.dot_general %x, %t, contracting_dims = [0] x [0]
    : (tensor<8x{SIZE}xf32>, tensor<8x{SIZE}xf32>) -> tensor<{SIZE}x{SIZE}xf32>
  %n = stablehlo.subtract %w, %d : tensor<{SIZE}x{SIZE}xf32>
  return %n : tensor<{SIZE}x{SIZE}xf32>
}}
"""
WEIGHTS = 4 * SIZE * SIZE
ROWS = 4 * 8 * SIZE


def fragments(cluster: str, batches: int, program: str = STEP) -> dict[str, float]:
    """Predicted seconds of one run under data parallelism, by part of the step."""
    options = f"cluster={cluster} num-micro-batches={batches} intra=data-parallel num-stages=1"
    module = alpa.passes.run(parse(program), f"alpa{{{options}}}")
    return {it.part: it.seconds for it in read_planned(module).fragments}


def memory_seconds(cluster: str, *kernels: float) -> float:
    device = Cluster.parse(cluster).device
    return sum(device.launch + float(device.seconds(0.0, size, "f32")) for size in kernels)


def test_every_device_reads_weights_that_are_not_split() -> None:
    found = fragments("h100:1x8", 1)["forward"]
    # The product reads all weights and its rows of the operand; tanh reads and writes rows.
    expected = memory_seconds("h100:1x8", WEIGHTS + 2 * ROWS / 8, 2 * ROWS / 8)
    assert found == pytest.approx(expected, rel=1e-2)


def test_the_kernel_that_makes_a_gradient_reads_the_sum_so_far() -> None:
    found = fragments("h100:1x8", 4)["backward"]
    product = memory_seconds("h100:1x8", WEIGHTS + 2 * ROWS / 8)
    reading = float(Cluster.parse("h100:1x8").device.seconds(0.0, WEIGHTS, "f32"))
    assert found == pytest.approx(product + reading, rel=1e-2)


def test_on_ideal_devices_adding_takes_no_time_and_bytes_are_split_as_work() -> None:
    found = fragments("h100:1x8,ideal", 4)["backward"]
    expected = memory_seconds("h100:1x8,ideal", (WEIGHTS + 2 * ROWS) / 8)
    assert found == pytest.approx(expected, rel=1e-2)


CONVOLUTION = """
func.func public @main(
    %w: tensor<1x1x64x64xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %x: tensor<8x4x4x64xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<1x1x64x64xf32> {alpa.result = "state:0"}) {
  %h = stablehlo.convolution(%x, %w) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
    window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<8x4x4x64xf32>, tensor<1x1x64x64xf32>) -> tensor<8x4x4x64xf32>
  %d = stablehlo.convolution(%x, %h) dim_numbers = [f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f],
    window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<8x4x4x64xf32>, tensor<8x4x4x64xf32>) -> tensor<1x1x64x64xf32>
  %n = stablehlo.subtract %w, %d : tensor<1x1x64x64xf32>
  return %n : tensor<1x1x64x64xf32>
}
"""


def test_a_convolution_does_not_add() -> None:
    """Its gradient is added by a kernel of its own, which is launched."""
    device = Cluster.parse("h100:1x1").device
    found = fragments("h100:1x1", 4, CONVOLUTION)["backward"]
    alone = fragments("h100:1x1", 1, CONVOLUTION)["backward"]
    adding = memory_seconds("h100:1x1", 3 * 4 * 64 * 64)
    assert found - alone == pytest.approx(adding)
    assert adding > device.launch
