"""Searches strategies as a decision tree over sharding patterns (TAPAS, section 4.4, figure 4).

A level of the tree is a node of the problem, and a branch is a pattern of it. Levels are explored
breadth first. The search stops early on

* a branch that is incompatible with a pattern before it: its cost is infinite (section 4.4);
* a branch for which another one costs no more, with the same patterns wherever later nodes look,
  and the same decisions. The search below both is the same;
* a branch that is surely worse than a known strategy;
* the branches beyond the width: a number of the best ones, by the cost so far and a lower bound of
  the rest.

The lower bound hands the cost of each later node on to its neighbours before it, in equal shares.
What the branches beyond the width cost at least says how good the list is (`Explored.is_proven`).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

import numpy as np

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError, Problem

MOST_BRANCHES = 500_000
"""Of one level, before the best ones are taken. A wide search ends there."""
_ROUNDING = 1e-9
"""By how much sums of the same costs differ that are added up in another order."""


class TooManyBranchesError(ValueError):
    """A level has more branches than memory and time allow."""


@dataclass
class Counts:
    """Branches of all levels: those that were looked at, and why they were left."""

    candidates: int = 0
    incompatible: int = 0
    equal: int = 0
    """that look the same to all later nodes as a cheaper one"""
    worse: int = 0
    """than a known strategy, or than the best ones"""

    @property
    def valid(self) -> int:
        """The branches whose patterns are compatible."""
        return self.candidates - self.incompatible

    @property
    def pruned(self) -> int:
        """The branches below which nothing was explored."""
        return self.incompatible + self.equal + self.worse

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            candidates=self.candidates + other.candidates,
            incompatible=self.incompatible + other.incompatible,
            equal=self.equal + other.equal,
            worse=self.worse + other.worse,
        )


@dataclass(frozen=True, kw_only=True)
class Explored:
    """The ranked list of strategies, the cheapest first."""

    choices: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    """of each"""
    beyond: float
    """at least of every strategy below a branch beyond the width; inf: there is none"""
    counts: Counts
    width: int
    """of the tree"""

    @property
    def worst(self) -> float:
        """The cost of the last one."""
        return self.costs[-1]

    @property
    def is_proven(self) -> bool:
        """Whether each strategy that is not in the list costs at least as much as the last one, or
        as one in the list with the same decisions."""
        return self.beyond >= self.worst - _ROUNDING * abs(self.worst)


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """Where the search stops."""

    ranked: int
    """strategies in the list"""
    width: int
    """how many branches of a level, different to later nodes, are explored"""
    most: float = inf
    """the cost of a known strategy: what costs more is not explored"""
    deadline: float = inf
    """of `time.monotonic`"""


def explore(problem: Problem, *, decisions: Collection[int], limits: Limits) -> Explored:
    """The cheapest strategies that differ in the decisions: nodes, such as weights.

    The list may be shorter than wanted. Memory is not looked at. All costs of nodes and edges are
    part of the bound; with shifted costs it is higher.

    Raises:
        TooManyBranchesError: a level has too many branches.
        InfeasibleError: no strategy is valid.
        SolverFailedError: none of those within the width and the known cost is.
        TimeoutError: the deadline came.
    """
    order = levels(problem)
    tree = _Tree.of(problem, order)
    branches = _Branches(costs=np.array([tree.constant]))
    counts, beyond = Counts(), inf
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for level, node in enumerate(order):
        if time.monotonic() > limits.deadline:
            raise TimeoutError(f"time ended at node {level} of {len(order)}")
        parents, patterns, dropped = branches.grow(tree, level, node in decisions, limits, counts)
        beyond = min(beyond, dropped)
        if not len(parents):
            if beyond == inf and limits.most == inf:
                raise InfeasibleError((node,))
            raise SolverFailedError(
                f"no branch is left at node {level} of {len(order)}: all that were explored are "
                "incompatible"
            )
        history.append((parents, patterns))
    choices: list[tuple[int, ...]] = []
    best = np.argsort(branches.costs, kind="stable")[: limits.ranked]
    for branch in best.tolist():
        choice, at = [0] * len(order), branch
        for node, (parents, patterns) in zip(reversed(order), reversed(history), strict=True):
            choice[node], at = int(patterns[at]), int(parents[at])
        choices.append(tuple(choice))
    costs = tuple(branches.costs[best].tolist())
    return Explored(
        choices=tuple(choices), costs=costs, beyond=beyond, counts=counts, width=limits.width
    )


def levels(problem: Problem) -> list[int]:
    """The order of nodes: from the first one on, the neighbour that leaves the fewest open ends.

    Open ends are earlier nodes with later neighbours; the product of their numbers of patterns is
    how many branches can look different to later nodes.
    """
    sizes = [float(np.log(costs.size)) for costs in problem.node_costs]
    around: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        around[edge.source].add(edge.target)
        around[edge.target].add(edge.source)
    later = [len(others) for others in around]
    order: list[int] = []
    done: set[int] = set()
    reached: dict[int, float] = {}
    """by how much each neighbour of earlier nodes would make the open ends grow"""

    def growth(node: int) -> float:
        closed = sum(sizes[v] for v in around[node] if v in done and later[v] == 1)
        return (sizes[node] if later[node] else 0.0) - closed

    for start in range(len(sizes)):
        if start not in done:
            reached[start] = growth(start)
        while reached:
            node = min(reached, key=lambda v: (reached[v], v))
            del reached[node]
            order.append(node)
            done.add(node)
            touched: set[int] = set()
            for other in around[node]:
                later[other] -= 1
                touched |= around[other] - done if other in done and later[other] == 1 else {other}
            if later[node] == 1:
                touched |= around[node] - done
            for other in touched - done:
                reached[other] = growth(other)
    return order


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tree:
    order: list[int]
    costs: list[np.ndarray]
    """of each node's patterns, with what later nodes hand on to it"""
    before: list[list[tuple[int, np.ndarray]]]
    """of each node, the neighbours before it, and the matrix less what was handed on to them"""
    last: list[int]
    """the level of each node's last neighbour"""
    constant: float
    """what the first nodes of each component cost at least"""
    keys: list[np.ndarray]
    """a random number for each pattern of each node: sums of them identify sets of patterns"""

    @classmethod
    def of(cls, problem: Problem, order: list[int]) -> _Tree:
        level = {node: k for k, node in enumerate(order)}
        matrices: dict[tuple[int, int], np.ndarray] = {}
        for edge in problem.edges:
            first, second, costs = edge.source, edge.target, edge.costs
            if level[first] > level[second]:
                first, second, costs = second, first, costs.T
            known = matrices.get((first, second))
            matrices[first, second] = costs if known is None else known + costs
        behind: list[list[tuple[int, np.ndarray]]] = [[] for _ in order]
        last = [level[node] for node in range(len(order))]
        for (first, second), costs in matrices.items():
            behind[second].append((first, costs))
            last[first] = max(last[first], level[second])
        costs_of = [costs.astype(float) for costs in problem.node_costs]
        before: list[list[tuple[int, np.ndarray]]] = [[] for _ in order]
        constant = 0.0
        for node in reversed(order):
            share = costs_of[node] / max(1, len(behind[node]))
            for other, costs in behind[node]:
                least = (costs + share).min(axis=1)
                costs_of[other] = costs_of[other] + least
                # No branch has a pattern of infinite cost: nothing is left to explore below it.
                before[node].append((other, costs - np.where(least < inf, least, 0.0)[:, None]))
            if not behind[node]:
                constant += float(costs_of[node].min())
                costs_of[node] = costs_of[node] - costs_of[node].min()
        rng = np.random.default_rng(0)
        top = np.iinfo(np.uint64).max
        keys = [rng.integers(0, top, costs.size, np.uint64) for costs in costs_of]
        return cls(
            order=order, costs=costs_of, before=before, last=last, constant=constant, keys=keys
        )


@dataclass
class _Branches:
    """The branches of a level that are explored, and their patterns at the open ends."""

    costs: np.ndarray
    """so far, with the lower bound of the rest"""
    ends: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    open: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))
    """what identifies the patterns at the open ends"""
    decided: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))
    """what identifies the decisions"""

    def grow(
        self, tree: _Tree, level: int, is_decision: bool, limits: Limits, counts: Counts
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Explores a level; returns each branch's parent and pattern, and the least cost dropped
        though it may be part of the best strategy."""
        node = tree.order[level]
        total = self.costs[:, None] + tree.costs[node]
        for other, costs in tree.before[node]:
            total += costs[self.ends[other]]
        counts.candidates += total.size
        parents, patterns = np.nonzero(total < inf)
        costs = total[parents, patterns]
        counts.incompatible += total.size - costs.size
        if limits.most < inf:
            good = costs <= limits.most + _ROUNDING * abs(limits.most)
            counts.worse += int(good.size - good.sum())
            parents, patterns, costs = parents[good], patterns[good], costs[good]
        if costs.size > MOST_BRANCHES:
            raise TooManyBranchesError(
                f"{costs.size:,} branches at node {level} of {len(tree.order)}, at most "
                f"{MOST_BRANCHES:,} are explored"
            )
        open_, decided = self.open[parents], self.decided[parents]
        if is_decision:
            decided = decided + tree.keys[node][patterns]
        closing = [end for end in self.ends if tree.last[end] <= level]
        for end in closing:
            open_ = open_ - tree.keys[end][self.ends[end][parents]]
        stays = tree.last[node] > level
        if stays:
            open_ = open_ + tree.keys[node][patterns]
        best, dropped = _best(costs, open_, decided, limits, counts)
        parents, patterns = parents[best], patterns[best]
        self.ends = {e: taken[parents] for e, taken in self.ends.items() if e not in closing}
        if stays:
            self.ends[node] = patterns
        self.costs, self.open, self.decided = costs[best], open_[best], decided[best]
        return parents.astype(np.int32), patterns.astype(np.int16), dropped


def _best(
    costs: np.ndarray, open_: np.ndarray, decided: np.ndarray, limits: Limits, counts: Counts
) -> tuple[np.ndarray, float]:
    """The branches to explore, by cost, and the least cost of those beyond the width.

    Of branches that look the same to later nodes, the best ones with different decisions.
    """
    order = np.argsort(costs, kind="stable")
    mixed = open_ * np.uint64(0x9E3779B97F4A7C15) + decided
    _, first = np.unique(mixed[order], return_index=True)
    order = order[np.sort(first)]
    group, number = np.unique(open_[order], return_inverse=True)
    # The place of each branch among those that look the same, which stand in order of their costs.
    by_group = np.argsort(number, kind="stable")
    starts = np.searchsorted(number[by_group], np.arange(len(group)))
    place = np.empty(len(order), dtype=np.int64)
    place[by_group] = np.arange(len(order)) - starts[number[by_group]]
    order, number, place = (x[place < limits.ranked] for x in (order, number, place))
    counts.equal += len(costs) - len(order)
    if len(group) <= limits.width:
        return order, inf
    rank = np.empty(len(group), dtype=np.int64)
    rank[number[place == 0]] = np.arange(len(group))
    kept = rank[number] < limits.width
    counts.worse += int(len(order) - kept.sum())
    return order[kept], float(costs[order[~kept][0]])
