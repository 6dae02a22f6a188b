"""A sharding problem in vectors, for steps that visit many nodes at once.

The strategies of all nodes stand in one vector. Each edge stands twice, once at each *end*: the
strategies of the end's node are its *slots*, and each slot has a row of *entries*, one per strategy
of the node at the other end. Ends are sorted by *level*: nodes of a level have no edges between
them, and a visit level by level is a visit node by node in the given order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa.passes.solve.sharding.problem import Edge, Problem


def spread(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``begins[k], begins[k] + 1, ...``, so many as ``lengths[k]``, for one k after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(begins - (ends - lengths), lengths)


def least_places(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Where the least value stands in each stretch of ``values``, the first of equals."""
    begins = np.cumsum(lengths) - lengths
    least = np.minimum.reduceat(values, begins) if len(begins) else values
    hits = np.flatnonzero(values == np.repeat(least, lengths))
    owners = np.repeat(np.arange(len(lengths)), lengths)[hits]
    places = np.zeros(len(lengths), dtype=np.int64)
    places[owners[::-1]] = hits[::-1]
    return places - begins


@dataclass(frozen=True, kw_only=True, eq=False)
class Level:
    """Nodes that are visited together."""

    nodes: np.ndarray
    strategies: np.ndarray
    """of these nodes, among those of all nodes"""
    slots: tuple[int, int, int]
    """where the slots of the ends begin whose other node is behind, where those ahead, their end"""
    entries: slice
    rows: np.ndarray
    """where each slot's row begins, in ``entries``"""
    places: np.ndarray
    """of each slot's strategy, in ``strategies``"""


class Flat:
    """The vectors of a problem; ``order[k]`` is the k-th node to visit, by number if not given."""

    def __init__(self, problem: Problem, order: np.ndarray | None = None) -> None:
        count, edges = len(problem.node_costs), problem.edges
        self.num_nodes = count
        self.sizes = np.array([costs.size for costs in problem.node_costs], dtype=np.int64)
        self.begins = np.cumsum(self.sizes) - self.sizes
        """of each node's strategies"""
        self.owner = np.repeat(np.arange(count), self.sizes)
        """of each strategy"""
        rank = np.arange(count)
        if order is not None:
            rank[order] = np.arange(count)
        ends = np.array([(e.source, e.target) for e in edges], dtype=np.int64).reshape(-1, 2)
        level = _levels(ends, rank)
        node, other = ends.T.ravel(), ends[:, ::-1].T.ravel()
        ahead = rank[other] > rank[node]
        by_level = np.lexsort((rank[other], node, ahead, level[node]))
        place = np.empty(by_level.size, dtype=np.int64)
        place[by_level] = np.arange(by_level.size)
        self.node, self.other = node[by_level], other[by_level]
        """of each end"""
        self.ahead = ahead[by_level]
        """whether the other node is visited later"""
        self.edge, self.axis = by_level % max(len(edges), 1), by_level // max(len(edges), 1)
        """of each end; the node's axis in the edge's matrix"""
        self.twin = place[(by_level + len(edges)) % max(2 * len(edges), 1)]
        """the other end of the same edge"""
        widths = self.sizes[self.node]
        self.slots = np.append(0, np.cumsum(widths))
        """where each end's slots begin"""
        length = np.repeat(self.sizes[self.other], widths)
        self.length = length
        """of each slot's row"""
        self.rows = np.append(0, np.cumsum(length))
        """where each slot's row begins"""
        self.strategy = spread(self.begins[self.node], widths)
        """of each slot"""
        self.partner = np.repeat(self.other, widths)
        """the node at the other end of each slot"""
        self.across = spread(np.repeat(self.slots[:-1][self.twin], widths), length)
        """the slot at the other end of each entry; numpy would convert smaller numbers each time"""
        self._level = level
        self._ends = place.reshape(2, -1)
        """of each edge, by the axis of its matrix"""
        self.costs, self.entries = _joined(problem.node_costs), np.empty(int(self.rows[-1]))
        self._matrices: list[np.ndarray] = [edge.costs for edge in edges]
        self._write(range(len(edges)))

    def at(self, problem: Problem) -> Flat:
        """The vectors of a problem with the same nodes and edges at other costs."""
        other, old = copy(self), self._matrices
        other.costs, other.entries = _joined(problem.node_costs), self.entries.copy()
        other._matrices = new = [edge.costs for edge in problem.edges]
        other._write(k for k in range(len(new)) if new[k] is not old[k])
        return other

    def _write(self, edges: Iterable[int]) -> None:
        """Writes the entries of edges."""
        begins: list[list[int]] = self.rows[self.slots[self._ends]].tolist()
        for k in edges:
            costs = self._matrices[k]
            for axis, matrix in enumerate((costs, costs.T)):
                begin = begins[axis][k]
                self.entries[begin : begin + costs.size].reshape(matrix.shape)[...] = matrix

    @cached_property
    def levels(self) -> list[Level]:
        """In the order of visits."""
        return list(self._make_levels())

    def _make_levels(self) -> Iterator[Level]:
        count = int(self._level.max(initial=-1)) + 1
        nodes = np.lexsort((np.arange(self.num_nodes), self._level))
        node_cuts = np.searchsorted(self._level[nodes], np.arange(count + 1))
        end_cuts = np.searchsorted(self._level[self.node], np.arange(count + 1))
        local = np.empty(self.costs.size, dtype=np.int64)
        for number in range(count):
            mine = nodes[node_cuts[number] : node_cuts[number + 1]]
            first, last = end_cuts[number : number + 2]
            middle = first + int(np.searchsorted(self.ahead[first:last], True))
            begin, split, end = (int(self.slots[k]) for k in (first, middle, last))
            strategies = spread(self.begins[mine], self.sizes[mine])
            local[strategies] = np.arange(strategies.size)
            entries = slice(int(self.rows[begin]), int(self.rows[end]))
            yield Level(
                nodes=mine,
                strategies=strategies,
                slots=(begin, split, end),
                entries=entries,
                rows=self.rows[begin:end] - entries.start,
                places=local[self.strategy[begin:end]],
            )

    @cached_property
    def forward(self) -> np.ndarray:
        """One end of each edge: that whose other node is ahead."""
        return np.flatnonzero(self.ahead)

    @cached_property
    def ends_of(self) -> tuple[np.ndarray, np.ndarray]:
        """All ends, sorted by node, and where those of each node begin."""
        counts = np.bincount(self.node, minlength=self.num_nodes)
        return np.argsort(self.node, kind="stable"), np.append(0, np.cumsum(counts))

    def ends_at(self, nodes: np.ndarray) -> np.ndarray:
        """The ends of these nodes, one node after the other."""
        ends, begins = self.ends_of
        return ends[spread(begins[nodes], begins[nodes + 1] - begins[nodes])]

    def pairs(self, ends: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """The entry of each end under a choice."""
        here = self.slots[ends] + choice[self.node[ends]]
        return self.rows[here] + choice[self.other[ends]]

    def problem(self, costs: np.ndarray, entries: np.ndarray) -> Problem:
        """The problem with other costs and entries, without memory."""
        ends = self.forward
        nodes: list[int] = self.node[ends].tolist()
        others: list[int] = self.other[ends].tolist()
        begins: list[int] = self.rows[self.slots[ends]].tolist()
        sizes: list[int] = self.sizes.tolist()
        edges: list[Edge] = []
        for node, other, begin in zip(nodes, others, begins, strict=True):
            shape = sizes[node], sizes[other]
            matrix = entries[begin : begin + shape[0] * shape[1]].reshape(shape)
            edges.append(Edge(node, other, matrix))
        return Problem(node_costs=tuple(np.split(costs, self.begins[1:])), edges=tuple(edges))

    def cost(self, choice: np.ndarray) -> float:
        """``Problem.cost``."""
        nodes = self.costs[self.begins + choice].sum()
        return float(nodes + self.entries[self.pairs(self.forward, choice)].sum())


def _joined(costs: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *costs], dtype=float)


def _levels(ends: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The length of the longest way to each node from nodes that are visited earlier."""
    swapped = rank[ends[:, 0]] > rank[ends[:, 1]]
    early = np.where(swapped, ends[:, 1], ends[:, 0])
    late = np.where(swapped, ends[:, 0], ends[:, 1])
    level = [0] * rank.size
    order = np.argsort(rank[late], kind="stable")
    for before, after in zip(early[order].tolist(), late[order].tolist(), strict=True):
        if level[before] >= level[after]:
            level[after] = level[before] + 1
    return np.array(level, dtype=np.int64)
