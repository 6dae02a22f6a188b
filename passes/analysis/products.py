"""What an op multiplies: whether two of its factors are made of different values."""

from __future__ import annotations

from functools import reduce
from itertools import combinations
from operator import or_

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.graph import used_values

PRODUCTS = {
    "stablehlo.convolution",
    "stablehlo.divide",
    "stablehlo.dot_general",
    "stablehlo.dynamic_slice",
    "stablehlo.dynamic_update_slice",
    "stablehlo.gather",
    "stablehlo.multiply",
    "stablehlo.scatter",
    "stablehlo.select",
}
"""Ops of which the average over the micro-batches is not that of their operands' averages."""


def multiplies(op: ir.OpView, made_of: dict[ir.Value, int]) -> bool:
    """Whether an op, or one in its regions, multiplies values that have no part in common.

    `made_of`: the parts, as bits, of the values that it uses; what is inside is added.
    """
    if op.name in PRODUCTS:
        factors = [made_of[v] for v in op.operands if made_of.get(v)]
        return any(not a & b for a, b in combinations(factors, 2))
    if isinstance(op, stablehlo.WhileOp):
        block, parts = body(op, 1), [made_of.get(v, 0) for v in op.operands]
        while True:
            made_of.update(zip(block.arguments, parts, strict=True))
            if _multiplies_inside(block, made_of):
                return True
            carried = [made_of.get(v, 0) for v in terminator(block).operands]
            more = [a | b for a, b in zip(parts, carried, strict=True)]
            if more == parts:
                return False
            parts = more
    if isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
        return any(_multiplies_inside(block, made_of) for region in op.regions for block in region)
    return False


def _multiplies_inside(block: ir.Block, made_of: dict[ir.Value, int]) -> bool:
    for op in block.operations:
        if multiplies(op, made_of):
            return True
        parts = reduce(or_, (made_of.get(v, 0) for v in used_values(op)), 0)
        made_of.update(dict.fromkeys(op.results, parts))
    return False
