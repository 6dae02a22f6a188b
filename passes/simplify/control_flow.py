"""Loops that are known to run never or once, and branches that are known to be taken.

XLA simplifies them in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alpa.dialects import body, ir, stablehlo, walk
from alpa.passes.analysis.graph import move_body, replace_op
from alpa.passes.analysis.op_cost import loop_counter
from alpa.passes.analysis.op_kinds import CONTROL_FLOW
from alpa.passes.simplify.rewriter import HARMLESS, Rewriter, keep_sharding


# Pattern: while(x...) of no trips -> x...
def loop_of_no_trips(op: ir.OpView, _: Rewriter) -> Sequence[ir.Value] | None:
    return list(op.operands) if _trips(op) == 0 else None


# Pattern: while(x...) of one trip -> its body of x...
def loop_of_one_trip(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value] | None:
    return _moved(body(op, 1), op.operands, op, rewriter) if _trips(op) == 1 else None


# Pattern: if(true, x, y) -> x; if(false, x, y) -> y
# Pattern: case(i, x, y, ...) -> the i-th branch, or the last one if i is out of range
def taken_branch(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value] | None:
    condition = rewriter.splat(op.operands[0])
    if condition is None:
        return None
    taken, last = int(condition), len(op.regions) - 1
    if isinstance(op, stablehlo.IfOp):
        taken = 0 if condition else 1
    return _moved(body(op, taken if 0 <= taken <= last else last), (), op, rewriter)


def run_known_loops(block: ir.Block) -> None:
    """Rewrites the loops of no trips and of one in a block and its regions.

    It is for programs whose calls are not inlined yet: what never runs need not be.
    """
    rewriter, pending = Rewriter(), list(block.operations)[::-1]
    while pending:
        op = pending.pop()
        if op.operation.name not in CONTROL_FLOW:
            continue
        values: Sequence[ir.Value] | None = None
        if isinstance(op, stablehlo.WhileOp):
            values = loop_of_no_trips(op, rewriter)
            if values is None:
                values = loop_of_one_trip(op, rewriter)
        inner = rewriter.created
        if values is None:
            inner = [it for region in op.regions for it in region.blocks[0].operations]
        else:
            replace_op(op, keep_sharding(op, values))
        pending += inner[::-1]
        rewriter.created.clear()


def _trips(op: ir.OpView) -> int | None:
    """The number of a loop's trips, if it is known and its condition does nothing else."""
    assert isinstance(op, stablehlo.WhileOp)
    counter = loop_counter(op)
    if counter is None or any(it.operation.name not in HARMLESS for it in walk(body(op, 0))):
        return None
    return counter.trips


def _moved(
    block: ir.Block, operands: Iterable[ir.Value], op: ir.OpView, rewriter: Rewriter
) -> list[ir.Value]:
    """Moves a block's ops in front of the op that has it."""
    rewriter.created += list(block.operations)[:-1]
    return move_body(block, operands, op)
