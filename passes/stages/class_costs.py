"""Costs of equal layers on a mesh, and lower bounds of them, by class of layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from alpa.passes.sharding.strategies import most_ways
from alpa.passes.stages.exchange import End
from alpa.passes.stages.layer_classes import Link

ROWS = (
    "forward",
    "backward",
    "update",
    "state",
    "activation",
    "transient",
    "freed",
    "made",
    "second",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassCosts:
    """What each class of layers costs."""

    by_class: np.ndarray
    """[9, C], the rows being `ROWS`: seconds of one forward, one backward and one update, and bytes
    per device. The state includes accumulators of gradients. Activations are kept for one
    micro-batch in flight. Transient is the most that is needed besides at any time. If the backward
    is split, its first part frees some of the activations, and the second part reads what is made
    (`schedules/split_memory.Bytes`). The last row has the seconds of the second part."""
    links: dict[Link, float]
    """seconds each time that a link's value goes from one layer to another"""
    exchanged: dict[End, float]
    """bytes per device of values that a stage sends, of all versions held at a time, or receives"""


Costs = list[ClassCosts]


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastSeconds:
    """What a layer of each class takes at least on a mesh."""

    seconds: np.ndarray
    """[C]: of one forward and one backward run together"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Seconds of one device, by the factors along which they can be split."""

    costs: ClassCosts
    by_factors: list[dict[tuple[str, tuple[int, ...]], float]]
    """of each class, the seconds of its ops by the part of the step and the sizes of the factors
    that may be sharded, none for the starts of kernels; ops without a rule are in `costs` alone"""
    _split: dict[tuple[int, ...], ClassCosts] = field(
        default_factory=dict[tuple[int, ...], ClassCosts]
    )
    """by the sizes of the axes; the search asks for each many times"""

    def split(self, sizes: tuple[int, ...]) -> ClassCosts:
        """A lower bound per device of the costs on a mesh of these axes.

        The seconds are those of `Device.for_bounds`.

        An op is split along the axes that divide one of its factors, without the starts of its
        kernels. Everything else, and all memory, is split evenly, and nothing is sent.
        """
        if sizes not in self._split:
            self._split[sizes] = self._split_along(sizes)
        return self._split[sizes]

    def _split_along(self, sizes: tuple[int, ...]) -> ClassCosts:
        count = prod(sizes)
        by_class = self.costs.by_class.copy()
        for c, mine in enumerate(self.by_factors):
            for (part, factors), whole in mine.items():
                more = count / most_ways(factors, sizes) - 1
                by_class[ROWS.index(part), c] += whole * more
        return ClassCosts(
            by_class=by_class / count,
            links=dict.fromkeys(self.costs.links, 0.0),
            exchanged={end: held / count for end, held in self.costs.exchanged.items()},
        )
