"""Which values an op multiplies, and whether it is linear in its operands."""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.graph import inner_ops, union, used_values
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.op_kinds import (
    CONTROL_FLOW,
    ELEMENTWISE,
    LINEAR,
    OF_FACTORS,
    PRODUCTS,
    SUMS,
)


def is_linear(op: ir.OpView, varying: Collection[ir.Value]) -> bool:
    """Whether applying the op to averaged operands gives the average of its results.

    Only `varying` operands are averaged. Indices and conditions are not floats and have no average.
    """
    read = [v for v in op.operands if v in varying]
    if op.name in OF_FACTORS:
        return len(read) < 2
    if op.name == "stablehlo.divide":
        return op.operands[1] not in varying
    if op.name in PRODUCTS:
        return all(is_float(v.type) for v in read)
    if op.name in ELEMENTWISE:
        return not read or op.name in SUMS | LINEAR
    if op.name not in CONTROL_FLOW:
        return True
    parts = {v: 1 << number for number, v in enumerate(set(used_values(op)).intersection(varying))}
    return not multiplies(op, parts) and not any(
        is_float(each.results[0].type)
        and (
            each.name in ELEMENTWISE - PRODUCTS - SUMS - LINEAR
            or (each.name in OF_FACTORS and each.operands[0] == each.operands[1])
        )
        for each in inner_ops(op)
        if len(each.results)
    )


def multiplies(op: ir.OpView, made_of: dict[ir.Value, int]) -> bool:
    """Whether an op, or one in its regions, multiplies values that share no part.

    `made_of` maps each value that the op uses to its parts, as bits. Values inside regions are
    added.
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
        parts = union(made_of.get(v, 0) for v in used_values(op))
        made_of.update(dict.fromkeys(op.results, parts))
    return False
