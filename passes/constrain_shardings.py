"""Writes the planned shardings as constraints, which XLA keeps.

XLA keeps `sdy.sharding` on arguments and results of functions and on `sdy.sharding_constraint`. It
drops `sdy.sharding` on every other op. So each sharded result gets a constraint, and each variable
of a loop one at either end of the loop's body. No constraint is written where the only use of the
result fixes the same sharding, nor on constants, which cost nothing in any sharding.

Starts of dynamic slices, and of gathers that are such slices, get the bounds that StableHLO gives
them, because XLA loses those of slices that a constraint or another slice cuts again. So do those
inside manual computations.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x4xf32>) {
        %0 = stablehlo.tanh %a : tensor<8x4xf32>
        %1 = stablehlo.negate %0 : tensor<8x4xf32>
        mpmd.return %1 : tensor<8x4xf32>
      } : (!x) -> !x
      return %y : !x
    }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"a"}]>]>}
          : tensor<8x4xf32>
        %1 = stablehlo.negate %0
          {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>} : tensor<8x4xf32>
        return %1 : tensor<8x4xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … { … }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = stablehlo.tanh %a : tensor<8x4xf32>
        %2 = sdy.sharding_constraint %0 <@mesh_0, [{}, {"a"}]> : tensor<8x4xf32>
        %1 = stablehlo.negate %2 : tensor<8x4xf32>
        return %1 : tensor<8x4xf32>
      }
    }

**Requires**: modules as `lower-partial-sums` leaves them, whose ops have shardings.

**Ensures**: no op has `sdy.sharding`. Arguments, results and constraints hold all shardings.

**Options**: none.

**Fails when** a fragment has no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import body, func, ir, sdy, stablehlo, terminator, walk, walk_outside_manual
from alpa.dialects.sharding import Sharding, op_shardings
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.fragment_modules import SHARDING, FragmentModule, fragment_modules
from alpa.passes.sharding.slice_starts import Slices, bound_gather, bound_starts

# Each device can make its shard of their results at no cost.
_FREE = (stablehlo.ConstantOp, stablehlo.IotaOp)


@dataclass(frozen=True, kw_only=True)
class ConstrainShardings(Pass):
    """Writes the planned shardings as constraints, which XLA keeps."""

    name: ClassVar[str] = "constrain-shardings"

    def run(self, module: ir.Module, remark: Remark) -> None:
        for nested in fragment_modules(module):
            block = nested.function.entry_block
            if nested.mesh.size > 1:
                slices = Slices()
                for op in walk(block):
                    if isinstance(op, stablehlo.DynamicSliceOp):
                        bound_starts(op, slices)
                    elif isinstance(op, stablehlo.GatherOp):
                        bound_gather(op, slices)
            for op in walk_outside_manual(block):
                _constrain(op, nested)
            for op in walk(block):
                if SHARDING in op.attributes:
                    del op.attributes[SHARDING]


def _constrain(op: ir.OpView, nested: FragmentModule) -> None:
    """Writes an op's `sdy.sharding` as constraints on its results."""
    shardings = op_shardings(op)
    if shardings is None:
        return
    if isinstance(op, sdy.ShardingConstraintOp):
        op.attributes["sharding"] = shardings[0].to_attr()
        return
    if isinstance(op, _FREE) or nested.mesh.size == 1:
        return
    if isinstance(op, stablehlo.WhileOp):
        _pin_variables(op, shardings)
    for result, sharding in zip(op.results, shardings, strict=True):
        if sharding.dims and not _says_the_same(result, sharding, nested):
            attr = sharding.to_attr()
            with ir.InsertionPoint.after(op), op.location:
                constraint = sdy.ShardingConstraintOp(result, sharding=attr)
            result.replace_all_uses_except(constraint.result, constraint.operation)


def _pin_variables(loop: stablehlo.WhileOp, shardings: Sequence[Sharding]) -> None:
    """Fixes the shardings of a loop's variables in its body; XLA may infer others from uses."""
    block = body(loop, 1)
    end = terminator(block)
    for i, sharding in enumerate(shardings):
        if not sharding.dims:
            continue
        argument, attr = block.arguments[i], sharding.to_attr()
        with ir.InsertionPoint.at_block_begin(block), loop.location:
            start = sdy.ShardingConstraintOp(argument, sharding=attr)
        argument.replace_all_uses_except(start.result, start.operation)
        with ir.InsertionPoint(end), loop.location:
            end.operands[i] = sdy.ShardingConstraintOp(end.operands[i], sharding=attr).result


def _says_the_same(result: ir.Value, sharding: Sharding, nested: FragmentModule) -> bool:
    """Whether the only use of a result fixes the same sharding, or nothing uses it."""
    uses = list(result.uses)
    if len(uses) != 1:
        return not uses
    user = uses[0].owner
    if isinstance(user, func.ReturnOp):
        fixed = nested.results[uses[0].operand_number][SHARDING]
        return Sharding.from_attr(fixed) == sharding
    if isinstance(user, sdy.ShardingConstraintOp):
        return Sharding.from_attr(user.attributes["sharding"]) == sharding
    return False
