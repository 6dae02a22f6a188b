"""Exact reductions of the sharding problem, as for partitioned boolean quadratic programs (PBQP).

Each rule keeps at least one optimal choice and changes no optimal cost:

* **parallel edges** are added up
* **normalise**: what depends on one end only, ``M[i, j] = r[i] + c[j] + rest``, moves into the
  nodes; an edge with no rest is dropped (so are edges to a node with one strategy)
* **forbidden**: a strategy with infinite cost, or with no allowed partner on an edge, is dropped
* **dominated**: strategy a goes if some b costs no more wherever the neighbours stand:
  ``c[a] - c[b] + sum over edges of min over j (M[a, j] - M[b, j]) >= 0``
* **degree 0, 1, 2**: a node with at most two neighbours is minimised out: into the constant,
  into its neighbour's costs, or into an edge between its two neighbours (min-plus product)

What is left has at least three neighbours per node. ``lift`` undoes the eliminations backwards.

With usages the rules keep an optimal choice within memory: a strategy is only dominated by one that
never holds more, and a node is only minimised out when all its strategies hold the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import numpy as np

from alpa.passes.solve.sharding.blame import Blame
from alpa.passes.solve.sharding.matrices import least_difference, normalised
from alpa.passes.solve.sharding.problem import (
    Edge,
    InfeasibleError,
    Problem,
    Usage,
    with_edges_of_usages,
    with_strategies,
)
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Eliminated:
    """A node as it was when it went: costs of its strategies, matrices to its neighbours."""

    node: int
    strategies: np.ndarray
    costs: np.ndarray
    neighbours: list[tuple[int, np.ndarray, np.ndarray]]
    """(neighbour, its strategies then, matrix [own, neighbour's])"""


@dataclass(frozen=True, eq=False)
class Core:
    """A connected rest of the problem, with the nodes and strategies it had in the original."""

    nodes: tuple[int, ...]
    strategies: tuple[np.ndarray, ...]
    problem: Problem

    def numbered(self, choice: Sequence[int]) -> dict[int, int]:
        """A choice for the rest in the original's nodes and strategies."""
        chosen = zip(self.nodes, self.strategies, choice, strict=True)
        return {node: int(strategies[k]) for node, strategies, k in chosen}

    def of(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The original's choice, where all its strategies are left."""
        chosen = zip(self.nodes, self.strategies, strict=True)
        return tuple(int(np.searchsorted(kept, choice[node])) for node, kept in chosen)


class Reduction:
    """A problem being reduced. ``run`` applies all rules until none applies."""

    def __init__(self, problem: Problem, settings: Settings = DEFAULT) -> None:
        self._steps, self._tuning = settings.steps, settings.tuning
        self.costs = {v: _floats(c) for v, c in enumerate(problem.node_costs)}
        numbers = {size: np.arange(size) for size in {c.size for c in self.costs.values()}}
        self.strategies = {v: numbers[c.size] for v, c in self.costs.items()}
        self.edges: dict[int, dict[int, np.ndarray]] = {v: {} for v in self.costs}
        """``edges[u][v][i, j]``; each edge stands twice, the second one transposed"""
        self.constant = 0.0
        self._eliminated: list[_Eliminated] = []
        self._given = problem.node_costs
        self._usages, self._limit = problem.usages, problem.memory_limit
        self._held = _distinct_usages(problem)
        self._blame = Blame(self.costs)
        self._found: dict[Hashable, Any] = {}
        """by function and matrix, see `_once`"""
        self._normal: set[frozenset[int]] = set()
        """edges that are normalised"""
        self._waiting: deque[int] = deque()
        self._is_waiting: set[int] = set()
        for edge in problem.edges:
            self._add_edge(edge.source, edge.target, _floats(edge.costs))

    def run(self, *, deadline: float = inf) -> Reduction:
        """Applies the rules until none applies; raises ``InfeasibleError``.

        After the deadline no more strategies are compared, which is most of the work.
        """
        for node in self.costs:
            self._wake(node)
        while self._waiting:
            node = self._waiting.popleft()
            self._is_waiting.discard(node)
            if node in self.costs:
                self._reduce(node, compare=time.monotonic() <= deadline)
        return self

    def eliminate_all(self) -> Core:
        """Minimises out what has at most two neighbours, and drops what is forbidden; what is left.

        Which nodes, strategies and edges these are does not depend on costs that are finite.
        Raises ``InfeasibleError``.
        """
        waiting = deque(self.costs)
        while waiting:
            node = waiting.popleft()
            if node in self.costs:
                around = list(self.edges[node])
                if self.eliminate(node):
                    waiting.extend(around)
        self._drop_lonely()
        return self._core(sorted(self.costs))

    def _drop_lonely(self) -> None:
        """Drops the strategies that are forbidden, or have no allowed partner on an edge."""
        forbids: dict[int, list[int]] = {node: [] for node in self.costs}
        for node, around in self.edges.items():
            for other, costs in around.items():
                if node < other and costs.max() == inf:
                    forbids[node].append(other)
                    forbids[other].append(node)
        waiting = deque(v for v, it in self.costs.items() if forbids[v] or it.max() == inf)
        while waiting:
            node = waiting.popleft()
            least = [self.edges[node][other].min(axis=1) for other in forbids[node]]
            allowed = np.all(np.array([self.costs[node], *least]) < inf, axis=0)
            if not allowed.all():
                self._keep(node, allowed)
                waiting.extend(self.edges[node])

    def _reduce(self, node: int, *, compare: bool) -> None:
        self.drop_forbidden(node)
        for neighbour in list(self.edges[node]):
            if frozenset((node, neighbour)) not in self._normal:
                self.normalise(node, neighbour)
        if self.eliminate(node) or not compare or not self.drop_dominated(node):
            return
        self._wake(node)
        for neighbour in self.edges[node]:
            self._wake(neighbour)

    def _wake(self, node: int) -> None:
        if node not in self._is_waiting:
            self._is_waiting.add(node)
            self._waiting.append(node)

    def _add_edge(self, source: int, target: int, costs: np.ndarray) -> None:
        if target in self.edges[source]:
            costs = costs + self.edges[source][target]
        self.edges[source][target] = costs
        self.edges[target][source] = costs.T
        if self._normal:
            self._normal.discard(frozenset((source, target)))

    def _drop_edge(self, source: int, target: int) -> None:
        del self.edges[source][target]
        del self.edges[target][source]
        self._wake(source)
        self._wake(target)

    def _keep(self, node: int, mask: np.ndarray) -> None:
        """Keeps the strategies in ``mask``, in the node and in its edges."""
        if not mask.any():
            if not (self._given[node] < inf).any():
                raise InfeasibleError((node,))
            raise InfeasibleError(tuple(sorted({node, *self.edges[node], *self._blame.at(node)})))
        self.costs[node] = self.costs[node][mask]
        self.strategies[node] = self.strategies[node][mask]
        if node in self._held:
            self._held[node] = self._held[node][mask]
        for neighbour, costs in self.edges[node].items():
            kept = costs[mask]
            self.edges[node][neighbour] = kept
            self.edges[neighbour][node] = kept.T
            self._normal.discard(frozenset((node, neighbour)))
            self._wake(neighbour)

    def drop_forbidden(self, node: int) -> None:
        """Drops the node's strategies of infinite cost."""
        allowed = self.costs[node] < inf
        if not allowed.all():
            self._keep(node, allowed)

    def normalise(self, source: int, target: int) -> None:
        """Moves what one end decides alone out of an edge, and drops an edge that is then empty."""
        self._normal.add(frozenset((source, target)))
        costs = self.edges[source][target]
        rows, columns, rest, most, scale = self._once(normalised, costs)
        self._charge(source, target, rows)
        self._charge(target, source, columns)
        if most <= self._tuning.matrix_rounding * scale:
            self._drop_edge(source, target)
        else:
            self.edges[source][target] = rest
            self.edges[target][source] = rest.T
        for node in (source, target):
            if self.costs[node].max() == inf:
                self.drop_forbidden(node)

    def _charge(self, node: int, other: int, costs: np.ndarray | None) -> None:
        """Adds to the costs of a node's strategies; inf if the other node has no partner for it."""
        if costs is None:
            return
        self.costs[node] = self.costs[node] + costs
        if costs.max() == inf:
            self._blame.add(node, other)
            self._wake(node)

    def _once(self, function: Callable[[np.ndarray], T], costs: np.ndarray) -> T:
        """A function of a matrix, found once for equal ones: of a program's layers, most are."""
        key = function, costs.shape, costs.tobytes()
        if key not in self._found:
            self._found[key] = function(costs)
        return self._found[key]

    def drop_dominated(self, node: int) -> bool:
        """Drops the strategies that another one is never worse than; of equals the first stays."""
        count = self.costs[node].size
        if count == 1 or Step.DOMINANCE not in self._steps:
            return False
        excess = self.costs[node][:, None] - self.costs[node][None, :]
        np.fill_diagonal(excess, -inf)
        for costs in self.edges[node].values():
            if not (excess >= 0).any():
                return False
            excess += self._once(least_difference, costs)
        worse = excess >= 0
        if node in self._held and worse.any():
            held = self._held[node]
            pairs = np.nonzero(worse)
            worse[pairs] = (held[pairs[0]] >= held[pairs[1]]).all(axis=1)
        keep = np.ones(count, dtype=bool)
        for strategy in np.flatnonzero(worse.any(axis=1))[::-1]:
            keep[strategy] = not worse[strategy][keep].any()
        if keep.all():
            return False
        self._keep(node, keep)
        return True

    def eliminate(self, node: int) -> bool:
        """Minimises the node out if it has at most two neighbours; says whether it did."""
        if Step.ELIMINATION not in self._steps:
            return False
        around = self.edges[node]
        costs = self.costs[node]
        if len(around) > 2 or (node in self._held and np.ptp(self._held[node], axis=0).any()):
            return False
        if len(around) == 2:
            (left, a), (right, b) = around.items()
            pairs = self.costs[left].size * self.costs[right].size
            fits = pairs <= max(self._tuning.series_pairs, a.size + b.size)
            if not fits and right not in self.edges[left]:
                return False
        self._eliminated.append(
            _Eliminated(
                node,
                self.strategies[node],
                costs,
                [(other, self.strategies[other], matrix) for other, matrix in around.items()],
            )
        )
        del self.costs[node], self.edges[node]
        for other in around:
            del self.edges[other][node]
            self._blame.add(other, node)
            self._wake(other)
        if not around:
            self.constant += float(costs.min())
        elif len(around) == 1:
            ((other, matrix),) = around.items()
            self.costs[other] = self.costs[other] + (costs[:, None] + matrix).min(axis=0)
        else:
            (left, a), (right, b) = around.items()
            product = ((costs[:, None] + a).T[:, :, None] + b[None]).min(axis=1)
            self._add_edge(left, right, product)
        return True

    def rest(self) -> Core:
        """All that is left, with its memory; one node also has what the eliminated cost and hold.

        Usages keep their order, so that sums of bytes are the same to the last bit.
        """
        core = self._core(sorted(self.costs))
        if not core.nodes:
            return core
        number = {node: k for k, node in enumerate(core.nodes)}
        gone = {one.node: one.strategies[:1] for one in self._eliminated}
        left = [self.strategies[v] if v in number else gone[v] for v in range(len(self._given))]
        usages = tuple(
            _without_gone(usage, number, core.strategies[0].size)
            for usage in with_strategies(self._usages, left)
        )
        costs = (core.problem.node_costs[0] + self.constant, *core.problem.node_costs[1:])
        problem = replace(core.problem, node_costs=costs, usages=usages, memory_limit=self._limit)
        return replace(core, problem=with_edges_of_usages(problem))

    def cores(self) -> list[Core]:
        """The connected components of what is left, without memory."""
        seen: set[int] = set()
        cores: list[Core] = []
        for start in self.costs:
            if start in seen:
                continue
            seen.add(start)
            nodes = [start]
            for node in nodes:
                fresh = [other for other in self.edges[node] if other not in seen]
                seen.update(fresh)
                nodes += fresh
            cores.append(self._core(sorted(nodes)))
        return cores

    def _core(self, nodes: list[int]) -> Core:
        number = {node: k for k, node in enumerate(nodes)}
        edges = tuple(
            Edge(number[u], number[v], costs)
            for u in nodes
            for v, costs in self.edges[u].items()
            if u < v
        )
        return Core(
            nodes=tuple(nodes),
            strategies=tuple(self.strategies[node] for node in nodes),
            problem=Problem(node_costs=tuple(self.costs[v] for v in nodes), edges=edges),
        )

    def lift(self, core_choices: Mapping[int, int] | Sequence[int] = ()) -> tuple[int, ...]:
        """The original problem's choice from one (in original numbers) for the cores' nodes."""
        choice = dict(core_choices) if isinstance(core_choices, Mapping) else {}
        for gone in reversed(self._eliminated):
            costs = gone.costs
            for other, strategies, matrix in gone.neighbours:
                costs = costs + matrix[:, int(np.searchsorted(strategies, choice[other]))]
            choice[gone.node] = int(gone.strategies[int(np.argmin(costs))])
        return tuple(choice[node] for node in range(len(choice)))


def _floats(costs: np.ndarray) -> np.ndarray:
    """Costs as floats. No array here is ever written to."""
    return costs.astype(float, copy=False)


def _distinct_usages(problem: Problem) -> dict[int, np.ndarray]:
    """``[strategy, k]``: bytes of each different usage of a node; constant ones are left out."""
    columns: dict[int, dict[bytes, np.ndarray]] = {}
    made: dict[tuple[int, int], dict[bytes, np.ndarray]] = {}
    """of the arrays, which many nodes share, by axis"""
    distinct = {(usage.nodes, id(usage.bytes)): usage.bytes for usage in problem.usages}
    for (nodes, key), size in distinct.items():
        for axis, node in enumerate(nodes):
            if (key, axis) not in made:
                made[key, axis] = _columns(size, axis)
            if made[key, axis]:
                columns.setdefault(node, {}).update(made[key, axis])
    return {node: np.array(list(mine.values())).T for node, mine in columns.items()}


def _columns(size: np.ndarray, axis: int) -> dict[bytes, np.ndarray]:
    """The different usages of the node at an axis that bytes are, by their contents."""
    # What a node holds together with each strategy of another one is a usage of its own.
    held = np.moveaxis(size.astype(float), axis, 0).reshape(size.shape[axis], -1)
    return {column.tobytes(): column for column in held[:, np.ptp(held, axis=0) > 0].T}


def _without_gone(usage: Usage, number: Mapping[int, int], size: int) -> Usage:
    """A usage of what is left of its nodes; the first node, of so many strategies, has the rest."""
    nodes = tuple(number[node] for node in usage.nodes if node in number)
    held = usage.bytes
    if not nodes:
        nodes, held = (0,), np.full(size, held.item())
    elif len(nodes) < len(usage.nodes):
        held = held.reshape(-1)
    return Usage(nodes=nodes, bytes=held, start=usage.start, stop=usage.stop)
