"""Leaves out shardings of scatters that XLA (jaxlib 0.10.2) computes wrongly."""

from __future__ import annotations

from math import ceil, prod

from alpa.dialects import ir, stablehlo
from alpa.passes.sharding.strategies import Strategy


def sound_strategies(
    op: ir.OpView, strategies: tuple[Strategy, ...], sizes: tuple[int, ...]
) -> tuple[Strategy, ...]:
    """The strategies without those that XLA (jaxlib 0.10.2) computes wrongly.

    Along a dimension that indices number, most shards do not have the place of an index, and must
    stay as they are. If a device has one index, XLA reads a slice there, and writes it back. If
    the shard is itself a slice of an array, XLA reads that array, without the bounds of the shard:
    a device writes what other shards hold. Scatters of several indices are loops, which read the
    shard.
    """
    if not isinstance(op, stablehlo.ScatterOp):
        return strategies
    numbers = stablehlo.ScatterDimensionNumbers(op.scatter_dimension_numbers)
    numbered, vector = numbers.scattered_dims_to_operand_dims, numbers.index_vector_dim
    shape = ir.RankedTensorType(op.scatter_indices.type).shape
    place = len(op.inputs)

    def indices(strategy: Strategy) -> int:
        ways = [prod(sizes[axis] for axis in dim) for dim in strategy.operands[place]]
        dims = zip(shape, ways, strict=True)
        return prod(ceil(size / n) for d, (size, n) in enumerate(dims) if d != vector)

    return tuple(
        s for s in strategies if not any(s.operands[0][d] for d in numbered) or indices(s) > 1
    )
