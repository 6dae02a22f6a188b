"""What equal layers cost on a mesh, and what no mesh undercuts, class by class of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from alpa.passes.sharding.strategies import most_ways
from alpa.passes.stages.exchange import End
from alpa.passes.stages.layer_classes import Link

_PARTS = ("forward", "backward", "update")
_KINDS = ("state", "activation", "transient")


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassCosts:
    """Per class: seconds of one micro-batch's forward and backward, of one update; bytes a device.

    `state` holds accumulators of gradients, too; `activation` is what one micro-batch in flight
    keeps, `transient` the most that is needed besides at any time.
    """

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    state: np.ndarray
    activation: np.ndarray
    transient: np.ndarray
    links: dict[Link, float]
    """seconds each time that a link's value goes from one layer to another"""
    sent: dict[End, float]
    """bytes a device of what a stage sends, of all versions that it holds at a time"""
    received: dict[End, float]
    """bytes a device of what a stage receives"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Seconds of one device by what they can be split along."""

    costs: ClassCosts
    by_factors: list[dict[tuple[str, tuple[int, ...]], float]]
    """of each class, the seconds of its ops by the part of the step and the sizes of the factors
    that may be sharded; what has no rule is in `costs` alone"""

    def split(self, sizes: Sequence[int]) -> ClassCosts:
        """What no sharding on a mesh of these axes undercuts, per device.

        An op is split along the axes that divide some factor of it, the rest and all memory evenly,
        and nothing is sent.
        """
        count = prod(sizes)
        seconds = {part: getattr(self.costs, part).copy() for part in _PARTS}
        for c, mine in enumerate(self.by_factors):
            for (part, factors), whole in mine.items():
                seconds[part][c] += whole * (count / most_ways(factors, sizes) - 1)
        return replace(
            self.costs,
            **{part: found / count for part, found in seconds.items()},
            **{kind: getattr(self.costs, kind) / count for kind in _KINDS},
            links=dict.fromkeys(self.costs.links, 0.0),
            sent={end: held / count for end, held in self.costs.sent.items()},
            received={end: held / count for end, held in self.costs.received.items()},
        )
