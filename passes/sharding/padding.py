"""Uneven shards, which XLA pads: of 10 rows on 7 devices each holds 2, the last two none.

A factor of an op may be cut unevenly where this costs little and XLA's partitioner (jaxlib 0.10.2)
needs no other collectives than for even shards:

* one axis alone cuts the factor. Where several axes cut a dimension unevenly, XLA exchanges borders
  between neighbours or replicates the value;
* the factor has more elements than the axis has devices, so padding less than doubles the work;
* the op can have such a factor (`padded_ops.py`).

Arguments and results of a fragment, variables of loops, results of branches and partial sums stay
even: JAX refuses uneven shards of an executable's arguments and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from alpa.dialects.sharding import ShardingRule
from alpa.passes.cost.reshard import Layout


def divides(size: int, ways: int) -> bool:
    """Whether a dimension may be cut into equal parts; an empty one is never cut."""
    return ways == 1 or (size > 0 and size % ways == 0)


def is_even(shape: Sequence[int], sizes: Sequence[int], layout: Layout) -> bool:
    """Whether a layout cuts a tensor of this shape into equal shards; it may be a partial sum's.

    XLA replicates tensors without elements, and JAX then cannot read shards of them.
    """
    if 0 in shape:
        return not any(layout)
    return all(
        divides(size, prod(sizes[a] for a in axes))
        for size, axes in zip(shape, layout, strict=False)
    )


def may_cut(rule: ShardingRule, sizes: Sequence[int], factor: int, axes: Sequence[int]) -> bool:
    """Whether these axes together may cut a factor, evenly or unevenly."""
    size = rule.factor_sizes[factor]
    if divides(size, prod(sizes[a] for a in axes)):
        return True
    return factor in rule.padded and len(axes) == 1 and size > sizes[axes[0]]


def speedup(size: int, ways: int) -> float:
    """How many times less work a device has if a factor of this size is cut so many ways."""
    return ways if divides(size, ways) else size / max(1, ceil(size / ways))
