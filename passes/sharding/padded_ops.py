"""Which factors of an op may be cut unevenly (`padding.py`).

`dot_general` introduces uneven shards, along an axis that divides none of its factors: where an
axis divides another factor, they are seldom worth their padding. Element-wise ops, broadcasts,
transposes, reshapes and sums take them over from their operands. XLA fills the padding of what is
summed with zeros. All other ops need even operands.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from alpa.dialects import ir, stablehlo
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.graph import combiner
from alpa.passes.analysis.op_kinds import SOURCES, TRIVIAL
from alpa.passes.sharding.padding import divides
from alpa.passes.sharding.sums import starts_sums

_INTRODUCES = "stablehlo.dot_general"
_TAKES_OVER = TRIVIAL | SOURCES | {_INTRODUCES, "stablehlo.optimization_barrier"}
# XLA fills the padding with the reduction's first value, of which more must change nothing.
_IDEMPOTENT = frozenset({"stablehlo.maximum", "stablehlo.minimum"})


def with_padding(op: ir.OpView, rule: ShardingRule) -> ShardingRule:
    """The rule of an op with the factors that may be cut unevenly, `ShardingRule.padded`."""
    if op.name not in _TAKES_OVER:
        return rule
    sums = True
    if isinstance(op, stablehlo.ReduceOp):
        sums = starts_sums(op) or (len(op.results) == 1 and combiner(op) in _IDEMPOTENT)
    return _padded(rule, sums=sums)


@lru_cache(maxsize=4096)
def _padded(rule: ShardingRule, *, sums: bool) -> ShardingRule:
    """With the factors that are alone in each of their dimensions."""
    dims = {dim for tensor in (*rule.operands, *rule.results) for dim in tensor}
    alone = {dim[0] for dim in dims if len(dim) == 1}
    whole = rule.need_replication | rule.permutation | (frozenset() if sums else rule.reduction)
    whole |= {factor for dim in dims if len(dim) > 1 for factor in dim}
    return replace(rule, padded=frozenset(alone - whole))


def padding_axes(op: ir.OpView, rule: ShardingRule, sizes: tuple[int, ...]) -> frozenset[int]:
    """The axes along which an op may introduce uneven shards."""
    if op.name != _INTRODUCES:
        return frozenset()
    fixed = rule.need_replication | rule.permutation
    free = [size for factor, size in enumerate(rule.factor_sizes) if factor not in fixed]
    return frozenset(
        axis for axis, n in enumerate(sizes) if n > 1 and not any(divides(s, n) for s in free)
    )
