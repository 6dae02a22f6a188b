"""Checks that every part of a step stands in the right layer or stage.

The pass changes nothing. `layer-cluster` and `stage-mesh-partition` check their own results in the
same way. The pass is for modules that somebody else wrote or changed.

**Before**::

    func.func public @main(%w: tensor<8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {
      %y = mpmd.named_computation<"layer_0"> (%x, %w) (%a: tensor<4x8xf32>, %b: tensor<8x8xf32>) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        mpmd.return %0 : tensor<4x8xf32>
      } : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      return %y : tensor<4x8xf32>
    }

**After**::

    func.func public @main(%w: tensor<8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {
      %y = mpmd.named_computation<"layer_0"> (%x, %w) (%a: tensor<4x8xf32>, %b: tensor<8x8xf32>) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        mpmd.return %0 : tensor<4x8xf32>
      } : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      return %y : tensor<4x8xf32>
    }

**Requires**: layers as `layer-cluster` makes them, or a plan from `stage-mesh-partition` to
`insert-cross-mesh-reshard`.

**Ensures**: the module is unchanged, and none of the errors below applies
(`plan/layer_checks.py` has the reasons).

**Options**: none.

**Fails when** an op is outside of any layer, or a layer occurs twice. A value may not flow from a
later stage or layer to an earlier one in the forward part, the other way in the backward part, or
from an update into either. A backward computation may not add to a gradient that another layer or
mesh made. An update may not mix layers unless it is `update_global`. On meshes, the pass also fails
when a layer's backward or update is apart from its forward, stages are not intervals of layers, or
one copy of a state is not replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import ir
from alpa.dialects.mpmd_types import read_topology
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.layer_checks import check_layers, check_stages


@dataclass(frozen=True, kw_only=True)
class VerifyLayers(Pass):
    """Checks that every part of a step stands in the right layer or stage."""

    name: ClassVar[str] = "verify-layers"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module)
        if read_topology(function):
            check_stages(module)
        else:
            check_layers(function)
