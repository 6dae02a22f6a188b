"""Strategies of one op on a logical mesh, from its sharding rule.

A strategy maps each mesh axis to at most one factor of the rule, or to none: Table 3 of the
paper for every op that the partitioner knows. It fixes the layouts of operands and results. A
sharded reduction factor leaves partial sums (`sums.py`); factors that need replication or their
neighbours' data are never sharded. A factor may be cut unevenly where XLA pads it (`padding.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, takewhile
from math import prod

from alpa.dialects.sharding import ShardingRule
from alpa.passes.cost.reshard import Layout, enumerate_layouts
from alpa.passes.sharding.padding import divides, is_even, may_cut, speedup


@dataclass(frozen=True)
class Strategy:
    """Layouts of operands and results.

    `reduced` are the axes that split the op's sums, `scattered` those of them along which the
    results are scattered, each with the dimension that it shards; `unreduced`: the results stay
    partial sums (`sums.py`). `shards` is how many times less work a device has, with its padding.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    reduced: tuple[int, ...]
    shards: float
    scattered: tuple[tuple[int, int], ...] = ()
    unreduced: bool = False
    padded: bool = False
    """whether a factor is cut unevenly"""

    @property
    def computed(self) -> tuple[Layout, ...]:
        """The layouts of the results' partial sums, which are theirs when all-reduced."""
        if self.unreduced:
            return tuple(layout[:-1] for layout in self.results)
        scattered = {axis for axis, _ in self.scattered}
        return tuple(
            tuple(tuple(a for a in dim if a not in scattered) for dim in layout)
            for layout in self.results
        )


Factors = Sequence[tuple[int, ...]]


def splittable(rule: ShardingRule) -> tuple[int, ...]:
    """The different sizes of factors that may be sharded, ascending."""
    fixed = rule.need_replication | rule.permutation
    return tuple(sorted({size for f, size in enumerate(rule.factor_sizes) if f not in fixed}))


def most_ways(factors: Sequence[int], sizes: Sequence[int]) -> float:
    """An upper bound on `Strategy.shards`: each axis cuts the factor that it pads least."""
    return prod(
        max((speedup(size, n) for size in factors if size > n or divides(size, n)), default=1)
        for n in sizes
    )


@lru_cache(maxsize=4096)
def enumerate_strategies(
    rule: ShardingRule, sizes: tuple[int, ...], padding: frozenset[int] = frozenset()
) -> tuple[Strategy, ...]:
    """All strategies of an op with this rule on a mesh with these axis sizes.

    Replicated is first. A factor is sharded only where it divides evenly, or by one of the axes
    `padding`, and a minor factor of a dimension only under a fully sharded major one.
    """
    fixed = rule.need_replication | rule.permutation
    free = [f for f in range(len(rule.factor_sizes)) if f not in fixed]
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Strategy] = {}
    for choice in product(*([None, *free] if size > 1 else [None] for size in sizes)):
        axes: list[tuple[int, ...]] = [()] * len(rule.factor_sizes)
        for axis, factor in enumerate(choice):
            if factor is not None:
                axes[factor] = (*axes[factor], axis)
        strategy = strategy_of(rule, sizes, axes)
        if strategy is None:
            continue
        if strategy.padded and not all(
            _evenly(rule, sizes, f, on) or padding & {*on} for f, on in enumerate(axes)
        ):
            continue
        found.setdefault((strategy.operands, strategy.results), strategy)
    return tuple(found.values())


def strategy_of(rule: ShardingRule, sizes: tuple[int, ...], axes: Factors) -> Strategy | None:
    """The strategy with these axes on each factor, None where they may not cut it."""
    shards, ways, padded = [1] * len(axes), 1.0, False
    for factor, on in enumerate(axes):
        if on:
            size, shards[factor] = rule.factor_sizes[factor], prod([sizes[a] for a in on])
            if not divides(size, shards[factor]):
                if not may_cut(rule, sizes, factor, on):
                    return None
                padded = True
            ways *= speedup(size, shards[factor])
    if not all(_representable(rule, dim, shards) for dim in _dims_of_several(rule)):
        return None
    return Strategy(
        tuple([_layout(tensor, axes) for tensor in rule.operands]),
        tuple([_layout(tensor, axes) for tensor in rule.results]),
        tuple(sorted([a for f in rule.reduction for a in axes[f]])),
        ways,
        padded=padded,
    )


def _evenly(rule: ShardingRule, sizes: tuple[int, ...], factor: int, axes: tuple[int, ...]) -> bool:
    return divides(rule.factor_sizes[factor], prod(sizes[a] for a in axes))


@lru_cache(maxsize=4096)
def _dims_of_several(rule: ShardingRule) -> tuple[tuple[int, ...], ...]:
    """The dimensions of operands and results that have several factors."""
    dims = [dim for tensor in (*rule.operands, *rule.results) for dim in tensor]
    return tuple(dict.fromkeys(dim for dim in dims if len(dim) > 1))


def _representable(rule: ShardingRule, dim: tuple[int, ...], shards: list[int]) -> bool:
    """Whether minor factors are sharded only below fully sharded major ones."""
    open_major = False
    for factor in dim:
        if shards[factor] > 1 and open_major:
            return False
        open_major = open_major or shards[factor] < rule.factor_sizes[factor]
    return True


def _layout(tensor: tuple[tuple[int, ...], ...], axes: Factors) -> Layout:
    return tuple(
        [
            axes[dim[0]] if len(dim) == 1 else tuple([a for factor in dim for a in axes[factor]])
            for dim in tensor
        ]
    )


@lru_cache(maxsize=65536)
def follow(rule: ShardingRule, sizes: tuple[int, ...], operand: int, layout: Layout) -> Strategy:
    """The strategy that takes over as much of an operand's layout as the op can.

    Axes that the op cannot take over (they would cut a factor that may not be cut so, or one that
    must be whole) are gathered before it: they are missing in the layout of that operand.
    """
    fixed = rule.need_replication | rule.permutation
    axes: list[tuple[int, ...]] = [() for _ in rule.factor_sizes]
    for factor, on in axes_of_factors(rule, sizes, rule.operands[operand], layout, fixed):
        axes[factor] = on
    strategy = strategy_of(rule, sizes, _without_minor(rule, sizes, axes))
    assert strategy is not None, "each factor may be cut so, and no minor one is cut"
    return strategy


def axes_of_factors(
    rule: ShardingRule,
    sizes: tuple[int, ...],
    tensor: Factors,
    layout: Layout,
    fixed: frozenset[int] = frozenset(),
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The axes of a tensor's layout that each of its factors takes, major factors first.

    The others, and those on `fixed` factors, have no factor.
    """
    for factors, axes in zip(tensor, layout, strict=False):
        left = list(axes)
        for factor in factors:
            size, on = rule.factor_sizes[factor], tuple[int, ...]()
            while left and factor not in fixed:
                if not may_cut(rule, sizes, factor, (*on, left[0])):
                    break
                on = (*on, left.pop(0))
            if on:
                yield factor, on
            if prod(sizes[a] for a in on) < size:
                break


def _without_minor(
    rule: ShardingRule, sizes: tuple[int, ...], axes: list[tuple[int, ...]]
) -> Factors:
    """Takes the axes off those factors that would cut a dimension below an open major one."""
    dims = _dims_of_several(rule)
    shards = [prod([sizes[a] for a in on]) for on in axes]
    while (dim := next((d for d in dims if not _representable(rule, d, shards)), None)) is not None:
        while not _representable(rule, dim, shards):
            minor = max((f for f in dim if shards[f] > 1), key=dim.index)
            axes[minor], shards[minor] = (), 1
    return tuple(axes)


@lru_cache(maxsize=4096)
def tensor_layouts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    """The layouts of a tensor that divide it evenly; replicated is first.

    Axes of size 1 are never used.
    """
    return tuple(
        layout
        for layout in enumerate_layouts(len(sizes), len(shape))
        if all(sizes[a] > 1 for axes in layout for a in axes) and is_even(shape, sizes, layout)
    )


def local_elements(shape: Sequence[int], sizes: tuple[int, ...], layout: Layout) -> int:
    """Elements of one device's shard, with padding."""
    elements = 1
    for size, axes in zip(shape, layout, strict=True):
        ways = prod([sizes[a] for a in axes]) if axes else 1
        elements *= -(-size // ways)
    return elements


def meet(first: Layout, second: Layout) -> Layout:
    """The finest layout that both are shards of: each dimension's common leading axes."""
    return tuple(
        tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*dims, strict=False)))
        for dims in zip(first, second, strict=True)
    )
