"""A training step that is planned for several clusters."""

from __future__ import annotations

from typing import Protocol

import pytest

from alpa import passes
from alpa.dialects import ir, parse

# Two equal layers, with updates by gradient descent.
_STEP = """
func.func public @main(%u: tensor<64x64xf32> {alpa.role = "state"},
                       %w: tensor<64x64xf32> {alpa.role = "state"},
                       %x: tensor<256x64xf32> {alpa.role = "batch", alpa.batch_dim = 0})
    -> (tensor<64x64xf32> {alpa.result = "state:0"}, tensor<64x64xf32> {alpa.result = "state:1"}) {
  %h = stablehlo.dot_general %x, %u, contracting_dims = [1] x [0]
    : (tensor<256x64xf32>, tensor<64x64xf32>) -> tensor<256x64xf32>
  %y = stablehlo.dot_general %h, %w, contracting_dims = [1] x [0]
    : (tensor<256x64xf32>, tensor<64x64xf32>) -> tensor<256x64xf32>
  %dh = stablehlo.dot_general %y, %w, contracting_dims = [1] x [1]
    : (tensor<256x64xf32>, tensor<64x64xf32>) -> tensor<256x64xf32>
  %dw = stablehlo.dot_general %h, %y, contracting_dims = [0] x [0]
    : (tensor<256x64xf32>, tensor<256x64xf32>) -> tensor<64x64xf32>
  %du = stablehlo.dot_general %x, %dh, contracting_dims = [0] x [0]
    : (tensor<256x64xf32>, tensor<256x64xf32>) -> tensor<64x64xf32>
  %nu = stablehlo.subtract %u, %du : tensor<64x64xf32>
  %nw = stablehlo.subtract %w, %dw : tensor<64x64xf32>
  return %nu, %nw : tensor<64x64xf32>, tensor<64x64xf32>
}
"""
OPTIONS = "num-micro-batches=4 intra=data-parallel"


class PlanStep(Protocol):
    """Plans the step with further options of `alpa`."""

    def __call__(self, cluster: str, options: str = "") -> ir.Module: ...


@pytest.fixture(scope="session")
def planned() -> PlanStep:
    def plan(cluster: str, options: str = "") -> ir.Module:
        module = parse(_STEP)
        passes.run(module, f"alpa{{cluster={cluster} {OPTIONS} {options}}}")
        return module

    return plan
