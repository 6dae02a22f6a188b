"""The costs of a sharding problem, added up term by term."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from alpa.passes.solve.sharding.problem import Edge


@dataclass(eq=False)
class Terms:
    """Costs of nodes, and of pairs of nodes under the smaller number first."""

    nodes: list[np.ndarray] = field(default_factory=list[np.ndarray])
    edges: dict[tuple[int, int], np.ndarray] = field(
        default_factory=dict[tuple[int, int], np.ndarray]
    )

    def add_node(self, costs: np.ndarray) -> int:
        """A new node with these costs, one per strategy; returns its number."""
        self.nodes.append(costs)
        return len(self.nodes) - 1

    def add(self, nodes: tuple[int, ...], costs: np.ndarray) -> None:
        """Adds costs of one node, or ``[i, j]`` of a pair, which may be the same node twice."""
        if len(nodes) == 2 and nodes[0] == nodes[1]:
            nodes, costs = nodes[:1], np.diagonal(costs)
        if len(nodes) == 1:
            self.nodes[nodes[0]] = self.nodes[nodes[0]] + costs
            return
        source, target = nodes
        if source > target:
            source, target, costs = target, source, costs.T
        old = self.edges.get((source, target))
        self.edges[source, target] = costs if old is None else old + costs

    def edge_list(self) -> tuple[Edge, ...]:
        """The pairs as edges of a ``Problem``."""
        return tuple(Edge(a, b, matrix) for (a, b), matrix in self.edges.items())
