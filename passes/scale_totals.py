"""Scales the totals that updates read: gradients and losses.

A total is a sum over the micro-batches. The step's loss is the mean or the sum of their losses, and
updates expect its gradients. So a gradient is multiplied by 1/N for a mean, with N micro-batches.
A loss is multiplied by 1/N if it is returned as a mean. The total is scaled in its own type, before
the update converts it.

**Before**::

    !g = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%g: !g) -> !g attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
        alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe",
        predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g)
          {alpa.module = @update, alpa.part = "update"} (%a: tensor<8xf32>) {
        %0 = stablehlo.negate %a : tensor<8xf32>
        mpmd.return %0 : tensor<8xf32>
      } : (!g) -> !g
      return %n : !g
    }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %g: tensor<8xf32> {alpa.total = "gradient",
                             sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}) {
        %0 = stablehlo.negate %g : tensor<8xf32>
        return %0 : tensor<8xf32>
      }
    }

**After** `scale-totals{loss-reduction=mean}`::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … { … }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}]>}) {
        %share = stablehlo.constant dense<2.500000e-01> : tensor<8xf32>
        %1 = stablehlo.multiply %g, %share : tensor<8xf32>
        %2 = sdy.sharding_constraint %1 <@mesh_0, [{"a"}]> : tensor<8xf32>
        %0 = stablehlo.negate %2 : tensor<8xf32>
        return %0 : tensor<8xf32>
      }
    }

**Requires**: modules as `accumulate-gradients` leaves them.

**Ensures**: updates read the step's gradients and losses, and no argument has `alpa.total`. A
constraint keeps a scaled value in the sharding of its total. Totals of integers stay as they are.

**Options**: see the fields.

**Fails when** an `alpa.total` is unknown, the micro-batches cannot be run as the plan says, or a
fragment has no module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alpa.dialects import filled, ir, sdy, stablehlo
from alpa.dialects.attributes import take_from_signature
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.plan.data import TOTAL
from alpa.passes.plan.fragment_modules import SHARDING, fragment_modules
from alpa.passes.plan.reader import read_planned


@dataclass(frozen=True, kw_only=True)
class ScaleTotals(Pass):
    """Scales the sums that updates read, so that they are those of the step's loss."""

    name: ClassVar[str] = "scale-totals"

    loss_reduction: Literal["mean", "sum"] = option(
        "mean",
        "whether updates see the `mean` or the `sum` of the micro-batches' gradients",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        mean = 1 / read_planned(module).num_micro_batches
        scales = {"mean": mean, "sum": 1.0}
        scales["gradient"] = scales[self.loss_reduction]
        known: dict[ir.Attribute, float] = {
            ir.StringAttr.get(kind): scale for kind, scale in scales.items()
        }
        for nested in fragment_modules(module):
            totals = take_from_signature(nested.function, "arg_attrs", TOTAL)
            block, attrs = nested.function.entry_block, nested.arguments
            with ir.InsertionPoint.at_block_begin(block), nested.fragment.location:
                for number, kind in totals.items():
                    if kind not in known:
                        message = f"{TOTAL} is {kind}; expected one of {', '.join(scales)}"
                        raise PassError(nested.function, message)
                    sharding = attrs[number][SHARDING] if nested.mesh.size > 1 else None
                    _scale(block.arguments[number], known[kind], sharding)


def _scale(total: ir.Value, scale: float, sharding: ir.Attribute | None) -> None:
    """Multiplies an argument, in its sharding. Otherwise XLA may gather it first."""
    type_ = ir.RankedTensorType(total.type)
    if scale == 1.0 or not isinstance(type_.element_type, ir.FloatType | ir.ComplexType):
        return
    product = stablehlo.MulOp(total, filled(type_, scale))
    scaled = product.result
    if sharding is not None and type_.rank:
        scaled = sdy.ShardingConstraintOp(scaled, sharding=sharding).result
    total.replace_all_uses_except(scaled, product.operation)
