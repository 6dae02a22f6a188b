"""A small training step with places in a source, planned for two stages of two devices each."""

from __future__ import annotations

import pytest

from alpa import passes
from alpa.dialects import ir
from alpa.passes.plan.data import Program
from alpa.passes.plan.reader import read_planned

STEP = """\
func.func public @main(
    %w0: tensor<64x64xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %w1: tensor<64x64xf32> {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %m: tensor<64x64xf32> {alpa.role = "state", tf.aliasing_output = 2 : i32},
    %x: tensor<8x64xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<64x64xf32> {alpa.result = "state:0"}, tensor<64x64xf32> {alpa.result = "state:1"},
        tensor<64x64xf32> {alpa.result = "state:2"}) {
  %a = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
    loc("jit(step)/jvp(Model)/first/dot_general"("model.py":7:3))
  %h = stablehlo.tanh %a : tensor<8x64xf32>
  %y = stablehlo.dot_general %h, %w1, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
    loc("jit(step)/jvp(Model)/second/dot_general"("model.py":9:3))
  %g1 = stablehlo.dot_general %h, %y, contracting_dims = [0] x [0]
    : (tensor<8x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
  %d = stablehlo.dot_general %y, %w1, contracting_dims = [1] x [1]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %d1 = stablehlo.multiply %d, %h : tensor<8x64xf32>
  %g0 = stablehlo.dot_general %x, %d1, contracting_dims = [0] x [0]
    : (tensor<8x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
  %n1 = stablehlo.subtract %w1, %g1 : tensor<64x64xf32>
  %nm = stablehlo.add %m, %g0 : tensor<64x64xf32>
  %n0 = stablehlo.subtract %w0, %nm : tensor<64x64xf32>
  return %n0, %n1, %nm : tensor<64x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>
}
"""


@pytest.fixture(scope="module")
def two_stages() -> ir.Module:
    return passes.run(
        STEP,
        "simplify-trivial-ops,layer-cluster{num-layers=2},"
        "stage-mesh-partition{cluster=v100-16gb:1x4 num-stages=2 num-micro-batches=3 "
        "schedule=1f1b},place-gradient-reductions,ilp-shard-annotate{intra=data-parallel},"
        "insert-cross-mesh-reshard",
    )


@pytest.fixture(scope="module")
def program(two_stages: ir.Module) -> Program:
    return read_planned(two_stages)
