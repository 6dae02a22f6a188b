"""Where the sum of a gradient's parts over the devices is completed: an open sharding constraint.

Devices may keep the gradients of micro-batches as partial sums and reduce them once per step. An
update then reduces a gradient where it first reads it, once for all of its readers. It does not
reduce all gradients where it begins, because their reduced forms would be held all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cmp_to_key

from alpa.dialects import body, func, ir, mpmd, sdy, terminator
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.sharding import Sharding
from alpa.passes.analysis.graph import first_reader
from alpa.passes.sharding.sums import deferrable, linear_operands, starts_sums


def place_reductions(function: func.FuncOp, totals: AbstractSet[int] = frozenset()) -> None:
    """Inserts a constraint before the first reader of each gradient that may be partial sums.

    Args:
        function: a planned `@main` with several micro-batches.
        totals: results of `@main` that are read as sums over the micro-batches.
    """
    for fragment, arguments in _pending(function, totals):
        block = body(fragment)
        readers = [(first_reader(argument, block), argument) for argument in arguments]
        for reader, argument in sorted(readers, key=cmp_to_key(_in_order)):
            sharding = Sharding.open(mesh_of(fragment), ir.RankedTensorType(argument.type).rank)
            with ir.InsertionPoint(reader), fragment.location:
                constraint = sdy.ShardingConstraintOp(argument, sharding.to_attr())
            argument.replace_all_uses_except(constraint.result, constraint.operation)


def count_unplaced(function: func.FuncOp) -> int:
    """The gradients for which `place_reductions` would insert a constraint."""
    return sum(len(arguments) for _, arguments in _pending(function, frozenset()))


def _pending(
    function: func.FuncOp, totals: AbstractSet[int]
) -> list[tuple[mpmd.FragmentOp, Sequence[ir.Value]]]:
    """Updates, and those of their arguments that may be partial sums and have no constraint."""
    fragments = [op for op in body(function).operations if isinstance(op, mpmd.FragmentOp)]
    partial: set[ir.Value] = set()
    for fragment in fragments:
        if read_part(fragment) == "backward":
            results = summed_results(fragment, totals)
            partial |= {fragment.results[i] for i in _partial(body(fragment), results)}
    found: list[tuple[mpmd.FragmentOp, Sequence[ir.Value]]] = []
    for fragment in fragments:
        if read_part(fragment) == "update":
            pairs = zip(body(fragment).arguments, fragment.operands, strict=True)
            waiting = [arg for arg, operand in pairs if operand in partial and not _is_placed(arg)]
            found.append((fragment, waiting))
    return found


def _is_placed(argument: ir.Value) -> bool:
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


def summed_results(fragment: mpmd.FragmentOp, totals: AbstractSet[int]) -> list[int]:
    """The results that are read as sums over the micro-batches only, on the fragment's mesh."""

    def is_summed(use: ir.OpOperand) -> bool:
        user = use.owner
        if isinstance(user, mpmd.FragmentOp):
            return mesh_of(user) == mesh_of(fragment) and read_part(user) == "update"
        return isinstance(user, func.ReturnOp) and use.operand_number in totals

    return [
        i
        for i, result in enumerate(fragment.results)
        if list(result.uses) and all(map(is_summed, result.uses))
    ]


def _partial(block: ir.Block, results: list[int]) -> list[int]:
    """Those of a fragment's results that some sharding leaves as partial sums."""
    allowed = deferrable(block, results)
    partial: set[ir.Value] = set()
    for op in block.operations:
        if op.results and op.results[0] in allowed:
            reads = [op.operands[i] in partial for i in linear_operands(op)]
            if starts_sums(op) or any(reads):
                partial.add(op.results[0])
    returned = terminator(block).operands
    return [i for i in results if returned[i] in partial]


def _in_order(one: tuple[ir.Operation, ir.Value], other: tuple[ir.Operation, ir.Value]) -> int:
    if one[0] == other[0]:
        return 0
    return -1 if one[0].is_before_in_block(other[0]) else 1
