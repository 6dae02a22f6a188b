"""Finds the dimensions of an op's operands and results along which it computes row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from alpa.dialects import ir, sdy, stablehlo
from alpa.dialects.attributes import GRADIENT, marker_of
from alpa.passes.analysis.graph import shape, splat
from alpa.passes.analysis.op_kinds import ELEMENTWISE


def same_rows(op: ir.OpView) -> Iterator[list[tuple[ir.Value, int]]]:
    """For each dimension of an op's results that is computed row by row: the results and operands
    with these rows, each with its dimension."""
    if not all(isinstance(result.type, ir.RankedTensorType) for result in op.results):
        return
    ranks = {len(shape(result)) for result in op.results}
    for result_dim in range(ranks.pop() if len(ranks) == 1 else 0):
        dims = operand_dims(op, result_dim)
        if dims is not None:
            operands = zip(op.operands, dims, strict=True)
            of_operands = [(operand, d) for operand, d in operands if d is not None]
            yield [*((result, result_dim) for result in op.results), *of_operands]


def operand_dims(op: ir.OpView, dim: int) -> list[int | None] | None:
    """The dimension of each operand that has the same rows as dimension `dim` of the results. It is
    None for an operand that every row needs as a whole.

    Returns None if the results are not computed row by row along `dim`, as far as is known.
    """
    if op.name in ELEMENTWISE or marker_of(op) == GRADIENT:
        size = shape(op.results[0])
        return [dim if shape(operand) == size else None for operand in op.operands]
    if isinstance(op, stablehlo.TransposeOp):
        return [list(ir.DenseI64ArrayAttr(op.permutation))[dim]]
    if isinstance(op, stablehlo.BroadcastInDimOp):
        dims = list(ir.DenseI64ArrayAttr(op.broadcast_dimensions))
        source = dims.index(dim) if dim in dims else None
        grows = source is not None and shape(op.operands[0])[source] != shape(op.results[0])[dim]
        return [None if grows else source]
    if isinstance(op, stablehlo.ReduceOp):
        reduced = list(ir.DenseI64ArrayAttr(op.dimensions))
        kept = [d for d in range(len(shape(op.operands[0]))) if d not in reduced]
        return [kept[dim]] * len(op.results) + [None] * len(op.results)
    if isinstance(op, stablehlo.ReshapeOp):
        source = unchanged_dims(shape(op.results[0]), shape(op.operands[0])).get(dim)
        return None if source is None else [source]
    if isinstance(op, stablehlo.ConstantOp):
        return None if splat(op.results[0]) is None else []
    if isinstance(op, sdy.ShardingConstraintOp):
        # Shards of rows are not those of parts of them.
        sharding = sdy.TensorShardingAttr(op.attributes["sharding"])
        is_split = sdy.DimensionShardingAttr(sharding.dimension_shardings[dim]).axes
        return None if is_split else [dim]
    return None


def unchanged_dims(old: Sequence[int], new: Sequence[int]) -> dict[int, int]:
    """Maps the dimensions that a reshape keeps to their new positions, except those of size 1."""
    ahead = {(math.prod(new[:d]), size): d for d, size in enumerate(new) if size != 1}
    places = {d: ahead.get((math.prod(old[:d]), size)) for d, size in enumerate(old)}
    return {d: place for d, place in places.items() if place is not None}
