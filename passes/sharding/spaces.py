"""The strategies of an op as arrays of layouts, and the variants of its partial sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.ops import Op
from alpa.passes.sharding.strategies import Strategy


class Layouts(tuple[Layout, ...]):
    """One layout per strategy.

    They are long and serve as keys of caches. The hash is computed once, and `of` returns one
    object for equal tuples, so that they are seldom compared item by item.
    """

    _hash: int

    def __new__(cls, layouts: Iterable[Layout]) -> Layouts:
        made = super().__new__(cls, layouts)
        made._hash = tuple.__hash__(made)
        return made

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, layouts: Iterable[Layout]) -> Layouts:
        return _known(tuple(layouts))


@lru_cache(maxsize=4096)
def _known(layouts: tuple[Layout, ...]) -> Layouts:
    return Layouts(layouts)


@dataclass(frozen=True, eq=False)
class Sums:
    """The variants of an op's partial sums.

    `ways[i, j]` is the op's strategy i with the result in layout j.
    """

    layouts: Layouts
    ways: dict[tuple[int, int], Strategy]

    @classmethod
    def of(cls, variants: Sequence[Sequence[Strategy]]) -> Sums | None:
        """From the variants of each strategy; None where each has only itself."""
        if all(len(mine) == 1 for mine in variants):
            return None
        layouts = Layouts.of(dict.fromkeys(v.results[0] for mine in variants for v in mine))
        number = {layout: j for j, layout in enumerate(layouts)}
        return cls(
            layouts,
            {(i, number[v.results[0]]): v for i, mine in enumerate(variants) for v in mine},
        )


@dataclass(frozen=True, eq=False)
class Space:
    """The strategies of an op, and the layouts that they give each operand and result."""

    strategies: tuple[Strategy, ...]
    operands: tuple[Layouts, ...]
    results: tuple[Layouts, ...]
    shares: np.ndarray
    """of the op's work on one device, by strategy"""
    sums: Sums | None = None

    @classmethod
    def of(cls, strategies: Sequence[Strategy], sums: Sums | None = None) -> Space:
        return cls(
            tuple(strategies),
            tuple(map(Layouts.of, zip(*(s.operands for s in strategies), strict=True))),
            tuple(map(Layouts.of, zip(*(s.results for s in strategies), strict=True))),
            np.array([1 / s.shards for s in strategies]),
            sums,
        )


@dataclass(frozen=True, eq=False)
class OpNode:
    """A node that is an op; where its space has sums, the node of its result is `result`."""

    op: Op
    node: int
    space: Space
    result: int | None = None

    def strategy(self, choice: Sequence[int]) -> Strategy:
        """The op's strategy under an assignment, with the variant of its sums."""
        if self.space.sums is None or self.result is None:
            return self.space.strategies[choice[self.node]]
        return self.space.sums.ways[choice[self.node], choice[self.result]]
