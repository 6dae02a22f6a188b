"""What each part of a sharding problem costs under a choice, by when it was added.

A `ShardGraph` is built step by step; what a step adds to nodes and edges, old ones among them, is
that step's: the seconds of one fragment are those that came with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from alpa.passes.sharding.shard_graph import ShardGraph


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """All costs of a graph so far, in seconds."""

    nodes: list[np.ndarray]
    edges: dict[tuple[int, int], np.ndarray]

    @classmethod
    def of(cls, graph: ShardGraph) -> Snapshot:
        return cls(nodes=[costs.copy() for costs in graph.costs], edges=dict(graph.edges))

    def cost(self, choice: Sequence[int]) -> float:
        """Of a choice for all nodes, those that come later among them."""
        nodes = sum(float(costs[i]) for costs, i in zip(self.nodes, choice, strict=False))
        return nodes + sum(float(m[choice[a], choice[b]]) for (a, b), m in self.edges.items())


def step_costs(snapshots: Sequence[Snapshot], choice: Sequence[int]) -> list[float]:
    """What each snapshot has more than the one before."""
    totals = [0.0, *(snapshot.cost(choice) for snapshot in snapshots)]
    return [after - before for before, after in pairwise(totals)]
