"""Finds all tensors that stack the layers of a loop, through the ops before, between and after.

The parameters of `lax.scan` are stacked in a loop over layers, and so are their gradients, the
optimizer's moments and new values: from a loop's own stacks one walks through the ops that keep
the dimension (element by element, transpose, broadcast ...), forwards and backwards. Loops that
share a stack share its rows, so they are cut at the same places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alpa.dialects import ir, stablehlo
from alpa.dialects.attributes import GRADIENT, marker_of
from alpa.passes.analysis.op_kinds import ELEMENTWISE
from alpa.passes.loops.layer_loops import LayerLoop
from alpa.passes.simplify.rewriter import shape, splat


@dataclass
class Stack:
    """Tensors with the same rows, and the loops over these. `dims[value]` is the dimension."""

    rows: int
    dims: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    loops: list[LayerLoop] = field(default_factory=list[LayerLoop])


def find_stacks(loops: Sequence[LayerLoop]) -> list[Stack]:
    """The stacks of a program's loops, in the order of their first loops.

    A tensor that would be stacked along two dimensions is so along the one that is met first.
    """
    loop_of = {loop.op.results[0]: loop for loop in loops}
    stacks: list[Stack] = []
    seen: set[ir.Value] = set()
    for seed in loops:
        if any(seed in stack.loops for stack in stacks):
            continue
        stack = Stack(seed.trips, loops=[seed])
        stacks.append(stack)
        pending = list(_stacked(seed))
        while pending:
            value, dim = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            stack.dims[value] = dim
            for op in _neighbours(value):
                loop = loop_of.get(op.results[0]) if len(op.results) else None
                if loop is None:
                    pending += _same_rows(op, value, dim)
                elif loop not in stack.loops and (value, dim) in list(_stacked(loop)):
                    stack.loops.append(loop)
                    pending += _stacked(loop)
    return stacks


def operand_dims(op: ir.OpView, dim: int) -> list[int | None] | None:
    """For an op whose results can be computed row by row of their dimension `dim`: the dimension
    of each operand that has the same rows, None where all rows need the whole operand.

    None where they cannot be, or where it is not known.
    """
    if op.name in ELEMENTWISE or marker_of(op) == GRADIENT:
        size = shape(op.results[0])
        return [dim if shape(operand) == size else None for operand in op.operands]
    if isinstance(op, stablehlo.TransposeOp):
        return [list(ir.DenseI64ArrayAttr(op.permutation))[dim]]
    if isinstance(op, stablehlo.BroadcastInDimOp):
        dims = list(ir.DenseI64ArrayAttr(op.broadcast_dimensions))
        source = dims.index(dim) if dim in dims else None
        grows = source is not None and shape(op.operands[0])[source] == 1
        return [None if grows else source]
    if isinstance(op, stablehlo.ReduceOp):
        reduced = list(ir.DenseI64ArrayAttr(op.dimensions))
        kept = [d for d in range(len(shape(op.operands[0]))) if d not in reduced]
        return [kept[dim]] * len(op.results) + [None] * len(op.results)
    if isinstance(op, stablehlo.ReshapeOp):
        before, after = shape(op.operands[0]), shape(op.results[0])
        for d, size in enumerate(before):
            if size == after[dim] and math.prod(before[:d]) == math.prod(after[:dim]):
                return [d]
        return None
    if isinstance(op, stablehlo.ConstantOp):
        return None if splat(op.results[0]) is None else []
    return None


def _neighbours(value: ir.Value) -> Iterator[ir.OpView]:
    """The op that makes a value, and those that read it."""
    if not isinstance(value.owner, ir.Block):
        yield value.owner.opview
    for use in value.uses:
        yield use.owner.operation.opview


def _same_rows(op: ir.OpView, value: ir.Value, dim: int) -> Iterator[tuple[ir.Value, int]]:
    """The operands and results of an op that have the rows of one of them, with the dimension."""
    if not all(isinstance(result.type, ir.RankedTensorType) for result in op.results):
        return
    ranks = {len(shape(result)) for result in op.results}
    for result_dim in range(ranks.pop() if len(ranks) == 1 else 0):
        dims = operand_dims(op, result_dim)
        if dims is None:
            continue
        found = [(result, result_dim) for result in op.results]
        operands = zip(op.operands, dims, strict=True)
        found += [(operand, d) for operand, d in operands if d is not None]
        if (value, dim) in found:
            yield from found


def _stacked(loop: LayerLoop) -> Iterator[tuple[ir.Value, int]]:
    for variable, dim in loop.stacks.items():
        yield loop.op.operands[variable], dim
        yield loop.op.results[variable], dim
