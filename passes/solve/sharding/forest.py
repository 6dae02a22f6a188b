"""The best strategies of a random forest of nodes at once, while all other nodes stay.

Where the edges between some nodes make no cycle, dynamic programming from the leaves to the roots
finds their best strategies, given all others. In the graphs of programs most nodes have few edges:
a random forest holds most, so that a few of them in turn reach what single changes never do.
"""

from __future__ import annotations

import numpy as np

from alpa.passes.solve.sharding.flat import Flat, least_places, spread


class Forest:
    """Nodes without a cycle between them: taken in turn from ``order``, where one closes none."""

    def __init__(self, flat: Flat, order: np.ndarray, leaves: np.ndarray | None = None) -> None:
        """``leaves``: more nodes, with one edge at most, and no edges between them."""
        self._flat = flat
        nodes = _without_cycles(flat, order)
        if leaves is not None:
            nodes = np.concatenate([nodes, leaves])
        self.nodes = np.sort(nodes)
        free = np.zeros(flat.num_nodes, dtype=bool)
        free[nodes] = True
        ends = flat.ends_at(self.nodes)
        inner = free[flat.other[ends]]
        self._outer = ends[~inner]
        self._rounds = self._peel(ends[inner], free)

    def _peel(self, ends: np.ndarray, waiting: np.ndarray) -> list[np.ndarray]:
        """Takes nodes with one neighbour left away, again and again; returns the neighbours' ends
        towards them. A last node of each tree is its root."""
        flat = self._flat
        node, other = flat.node[ends], flat.other[ends]
        degree = np.bincount(node, minlength=flat.num_nodes)
        begins = np.append(0, np.cumsum(degree))
        rounds: list[np.ndarray] = []
        tips = self.nodes[degree[self.nodes] == 1]
        while tips.size:
            mine = spread(begins[tips], begins[tips + 1] - begins[tips])
            mine = mine[waiting[other[mine]]]
            # Of two nodes that are left with each other, the smaller one is taken away.
            mine = mine[(degree[other[mine]] > 1) | (node[mine] < other[mine])]
            rounds.append(flat.twin[ends[mine]])
            waiting[node[mine]] = False
            np.subtract.at(degree, other[mine], 1)
            touched = np.unique(other[mine])
            tips = touched[degree[touched] == 1]
        self._roots = self.nodes[waiting[self.nodes]]
        return rounds

    def solve(self, costs: np.ndarray, entries: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """The choice with the forest's nodes at their best; costs and entries as in ``flat``."""
        flat, costs, choice = self._flat, costs.copy(), choice.copy()
        sizes = flat.sizes
        slots = spread(flat.slots[:-1][self._outer], sizes[flat.node[self._outer]])
        met = entries[flat.rows[slots] + choice[flat.partner[slots]]]
        np.add.at(costs, flat.strategy[slots], met)
        for ends in self._rounds:
            slots = spread(flat.slots[:-1][ends], sizes[flat.node[ends]])
            lengths = flat.length[slots]
            child = flat.begins[flat.partner[slots]]
            values = entries[spread(flat.rows[slots], lengths)] + costs[spread(child, lengths)]
            least = np.minimum.reduceat(values, np.cumsum(lengths) - lengths)
            np.add.at(costs, flat.strategy[slots], least)
        roots = self._roots
        values = costs[spread(flat.begins[roots], sizes[roots])]
        choice[roots] = least_places(values, sizes[roots])
        for ends in reversed(self._rounds):
            child = flat.other[ends]
            rows = flat.rows[flat.slots[ends] + choice[flat.node[ends]]]
            values = (
                entries[spread(rows, sizes[child])]
                + costs[spread(flat.begins[child], sizes[child])]
            )
            choice[child] = least_places(values, sizes[child])
        return choice


def _without_cycles(flat: Flat, order: np.ndarray) -> np.ndarray:
    """The nodes of ``order`` that join no two neighbours of one tree, as it has grown so far."""
    ends, begins = flat.ends_of
    parent: dict[int, int] = {}
    taken: list[int] = []
    others = flat.other[ends].tolist() if order.size > flat.num_nodes // 8 else None
    for node in order.tolist():
        first, last = int(begins[node]), int(begins[node + 1])
        around = others[first:last] if others else flat.other[ends[first:last]].tolist()
        roots: set[int] = set()
        for other in around:
            if other not in parent:
                continue
            while parent[other] != other:
                parent[other] = other = parent[parent[other]]
            if other in roots:
                break
            roots.add(other)
        else:
            parent[node] = node
            for root in roots:
                parent[root] = node
            taken.append(node)
    return np.array(taken, dtype=np.int64)
