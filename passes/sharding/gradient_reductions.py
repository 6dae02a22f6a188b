"""Where the sum of a gradient's parts over the devices is completed: an open sharding constraint.

Devices may keep the gradients of micro-batches as partial sums and reduce them once per step. With
one micro-batch, too, they may keep a gradient that adds up those of a parameter's uses. An update
then reduces a gradient where it first reads it, once for all of its readers. It does not
reduce all gradients where it begins, because their reduced forms would be held all at once.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from alpa.dialects import body, func, ir, mpmd, sdy, stablehlo, terminator
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.sharding import Sharding
from alpa.passes.analysis.graph import first_reader


def place_reductions(
    function: func.FuncOp, num_micro_batches: int, totals: AbstractSet[int] = frozenset()
) -> None:
    """Inserts a constraint before the first reader of each gradient that `reduced_later` names.

    Args:
        function: a planned `@main`.
        num_micro_batches: those of a step.
        totals: results of `@main` that are read as sums over the micro-batches.
    """
    fragments = [op for op in body(function).operations if isinstance(op, mpmd.FragmentOp)]
    summed = {
        fragment.results[i]
        for fragment in fragments
        if read_part(fragment) == "backward"
        for i in reduced_later(fragment, num_micro_batches, totals)
    }
    for fragment in fragments:
        block = body(fragment)
        for argument, operand in zip(block.arguments, fragment.operands, strict=True):
            if operand not in summed or is_placed(argument):
                continue
            sharding = Sharding.open(mesh_of(fragment), ir.RankedTensorType(argument.type).rank)
            with ir.InsertionPoint(first_reader(argument, block)), fragment.location:
                constraint = sdy.ShardingConstraintOp(argument, sharding.to_attr())
            argument.replace_all_uses_except(constraint.result, constraint.operation)


def is_placed(argument: ir.Value) -> bool:
    """Whether nothing reads a gradient but a constraint that completes it."""
    users = [use.owner for use in argument.uses]
    return all(isinstance(op, sdy.ShardingConstraintOp) and is_reduction(op) for op in users)


def is_reduction(op: sdy.ShardingConstraintOp) -> bool:
    """Whether a constraint asks an update for no layout: it completes a sum, if there is one."""
    block = op.operands[0].owner
    if not isinstance(block, ir.Block) or not isinstance(block.owner.opview, mpmd.FragmentOp):
        return False
    sharding = Sharding.from_attr(op.attributes["sharding"])
    return read_part(block.owner.opview) == "update" and sharding.is_open


def reduced_later(
    fragment: mpmd.FragmentOp, num_micro_batches: int, totals: AbstractSet[int]
) -> list[int]:
    """The results of a backward fragment that may stay partial sums: updates of its mesh alone read
    them, as sums of several terms.

    Those are the micro-batches' gradients, and those of a parameter's uses.
    """

    def is_summed(use: ir.OpOperand) -> bool:
        user = use.owner
        if isinstance(user, mpmd.FragmentOp):
            return mesh_of(user) == mesh_of(fragment) and read_part(user) == "update"
        return isinstance(user, func.ReturnOp) and use.operand_number in totals

    inner = terminator(body(fragment)).operands
    return [
        i
        for i, result in enumerate(fragment.results)
        if list(result.uses)
        and all(map(is_summed, result.uses))
        and (num_micro_batches > 1 or _adds_terms(inner[i]))
    ]


def _adds_terms(value: ir.Value) -> bool:
    """Whether a gradient is a sum of others."""
    return not isinstance(value.owner, ir.Block) and isinstance(value.owner, stablehlo.AddOp)
