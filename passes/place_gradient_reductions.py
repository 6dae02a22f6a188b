"""Marks where an update reduces a gradient that may still be partial sums.

With several micro-batches the devices of a mesh may keep a gradient as partial sums and reduce it
once per step (`ilp-shard-annotate` decides whether they do). This pass inserts an
`sdy.sharding_constraint` that is open in all dimensions before the first reader of each such
gradient in its update. All readers then share one reduction.

Before: a planned program (see `stage-mesh-partition`) whose update reads a gradient::

    (%w: tensor<16x16xf32>, %g: tensor<16x16xf32>) {
      %0 = stablehlo.multiply %g, %scale

After::

    (%w: tensor<16x16xf32>, %g: tensor<16x16xf32>) {
      %1 = sdy.sharding_constraint %g <@mesh_0, [{?}, {?}]>
      %0 = stablehlo.multiply %1, %scale

`ilp-shard-annotate` fills the constraint in, or removes it where the gradient is no partial sum. A
program with one micro-batch stays as it is.

Fails when: the module has no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import ir
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.gradient_reductions import place_reductions


@dataclass(frozen=True, kw_only=True)
class PlaceGradientReductions(Pass):
    """Marks where an update reduces a gradient that may still be partial sums."""

    name: ClassVar[str] = "place-gradient-reductions"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module)
        plan, _ = plan_and_cluster(function)
        if plan.num_micro_batches > 1:
            place_reductions(function)
