"""Loops that are known to run never or once, and branches that are known to be taken.

XLA's own simplifier takes them so, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import body, ir, stablehlo, walk
from alpa.passes.analysis.graph import move_body
from alpa.passes.analysis.op_cost import loop_counter
from alpa.passes.simplify.rewriter import HARMLESS, Rewriter


# Pattern: while(x...) of no trips -> x...
# Pattern: while(x...) of one trip -> its body of x...
def loop_of_no_or_one_trip(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value] | None:
    assert isinstance(op, stablehlo.WhileOp)
    counter = loop_counter(op)
    if counter is None or len(counter.values) > 1:
        return None
    if any(inner.operation.name not in HARMLESS for inner in walk(body(op, 0))):
        return None  # The condition runs at least once.
    if not counter.values:
        return list(op.operands)
    loop = body(op, 1)
    rewriter.created += list(loop.operations)[:-1]
    return move_body(loop, op.operands, op)


# Pattern: if(true, x, y) -> x; if(false, x, y) -> y
# Pattern: case(i, x, y, ...) -> the i-th, the last one where there is none
def taken_branch(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value] | None:
    condition = rewriter.splat(op.operands[0])
    if condition is None:
        return None
    taken, last = int(condition), len(op.regions) - 1
    if isinstance(op, stablehlo.IfOp):
        taken = 0 if condition else 1
    branch = body(op, taken if 0 <= taken <= last else last)
    rewriter.created += list(branch.operations)[:-1]
    return move_body(branch, (), op)
