"""Lower bounds and good choices for the sharding problem by dual ascent, without an LP solver.

The dual of the LP relaxation moves costs between nodes and edges: ``theta_v(i) + m(i)`` and
``theta_uv(i, j) - m(i)`` cost the same for every choice. For any such shift

    sum_v min_i theta_v(i) + sum_uv min_ij theta_uv(i, j)  <=  optimum.

The sweeps are those of sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006): each
visit gathers a node's share of its edges and hands it on to the edges ahead. The bound never
falls. It may stop short of the LP's: then ``shard_lp`` takes over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf

import numpy as np

from alpa.passes.solve.shard_problem import Edge, Problem

_ROUND_EVERY = 4
"""sweeps between two attempts to read a choice off the shifted costs"""
_STALL = 1e-3
"""Stop when so many sweeps improved the bound by less than this part of the gap."""
_ENOUGH = 0.2
"""Stop when this part of the strategies can be forbidden: presolve makes the rest faster."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bounded:
    """A problem whose costs were shifted (equal for every choice), its bound and best choice."""

    problem: Problem
    bound: float
    choice: tuple[int, ...]
    value: float
    """of ``choice``; inf if none was found"""


def dual_bound(problem: Problem) -> float:
    """The bound that the problem's costs show as they stand: the sum of all minima."""
    nodes = sum(float(costs.min()) for costs in problem.node_costs)
    return nodes + sum(float(edge.costs.min()) for edge in problem.edges)


def ascend(problem: Problem, *, sweeps: int, gap: float, deadline: float) -> Bounded:
    """At most ``sweeps`` double sweeps; stops at a relative ``gap``, a stall, or enough to prune.

    Every strategy must be finite and have an allowed partner on each edge, as presolve leaves it.
    """
    state = _Messages(problem)
    best: tuple[int, ...] = (0,) * len(problem.node_costs)
    value, bound, last = inf, -inf, -inf
    for sweep in range(sweeps):
        state.sweep(forward=True)
        state.sweep(forward=False)
        if sweep % _ROUND_EVERY != _ROUND_EVERY - 1 and sweep != sweeps - 1:
            continue
        choice = improve(problem, state.round())
        cost = problem.cost(choice)
        if cost < value:
            best, value = choice, cost
        bound = max(bound, dual_bound(state.problem()))
        closed = value - bound <= gap * abs(value)
        if closed or bound - last <= _STALL * (value - bound) or time.monotonic() > deadline:
            break
        if state.share_above(value - bound) > _ENOUGH:
            break
        last = bound
    shifted = state.problem()
    return Bounded(problem=shifted, bound=min(dual_bound(shifted), value), choice=best, value=value)


def prune(shifted: Problem, slack: float) -> tuple[Problem, int]:
    """Forbids what costs more than ``slack`` above its node's or edge's minimum.

    With ``slack`` = (a known value - the shifted problem's bound), every better choice is kept.
    Returns the problem and how many node strategies were forbidden.
    """
    nodes = tuple(np.where(c > c.min() + slack, inf, c) for c in shifted.node_costs)
    edges = tuple(
        Edge(e.source, e.target, np.where(e.costs > e.costs.min() + slack, inf, e.costs))
        for e in shifted.edges
    )
    gone = sum(
        int((new == inf).sum() - (old == inf).sum())
        for new, old in zip(nodes, shifted.node_costs, strict=True)
    )
    return Problem(node_costs=nodes, edges=edges), gone


def improve(problem: Problem, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Changes one node at a time while that lowers the cost."""
    around = neighbours(problem)
    now = list(choice)
    waiting = list(range(len(now)))
    for _ in range(20):
        changed: set[int] = set()
        for node in waiting:
            costs = problem.node_costs[node]
            for number, axis, other in around[node]:
                costs = costs + problem.edges[number].costs.take(now[other], axis=1 - axis)
            best = int(np.argmin(costs))
            if costs[best] < costs[now[node]]:
                now[node] = best
                changed.update(other for _, _, other in around[node])
        if not changed:
            break
        waiting = sorted(changed)
    return tuple(now)


def neighbours(problem: Problem) -> list[list[tuple[int, int, int]]]:
    """Per node: (edge, the node's axis in its matrix, the other end)."""
    around: list[list[tuple[int, int, int]]] = [[] for _ in problem.node_costs]
    for number, edge in enumerate(problem.edges):
        around[edge.source].append((number, 0, edge.target))
        around[edge.target].append((number, 1, edge.source))
    return around


class _Messages:
    def __init__(self, problem: Problem) -> None:
        self._nodes = [costs.astype(float) for costs in problem.node_costs]
        self._ends = [(edge.source, edge.target) for edge in problem.edges]
        # Both orientations, so that a visit always works on rows: [edge][axis of the node].
        matrices = [edge.costs.astype(float).copy() for edge in problem.edges]
        self._edges = [(matrix, matrix.T) for matrix in matrices]
        self._around = neighbours(problem)

    def sweep(self, *, forward: bool) -> None:
        order = range(len(self._nodes))
        for node in order if forward else reversed(order):
            self._visit(node, forward)

    def _visit(self, node: int, forward: bool) -> None:
        gathered = self._nodes[node]
        ahead: list[np.ndarray] = []
        for number, axis, other in self._around[node]:
            matrix = self._edges[number][axis]
            least = matrix.min(axis=1)
            gathered = gathered + least
            matrix -= least[:, None]
            if (other > node) == forward:
                ahead.append(matrix)
        behind = len(self._around[node]) - len(ahead)
        share = gathered / max(len(ahead), behind, 1)
        for matrix in ahead:
            matrix += share[:, None]
        self._nodes[node] = gathered - share * len(ahead)

    def problem(self) -> Problem:
        edges = tuple(
            Edge(u, v, matrix.copy())
            for (u, v), (matrix, _) in zip(self._ends, self._edges, strict=True)
        )
        return Problem(node_costs=tuple(self._nodes), edges=edges)

    def share_above(self, slack: float) -> float:
        """The part of the node strategies that ``prune`` would forbid."""
        above = sum(int((costs > costs.min() + slack).sum()) for costs in self._nodes)
        return above / sum(costs.size for costs in self._nodes)

    def round(self) -> tuple[int, ...]:
        """Node by node the best strategy, given those chosen and the best of those to come."""
        choice = [0] * len(self._nodes)
        for node, costs in enumerate(self._nodes):
            total = costs
            for number, axis, other in self._around[node]:
                matrix = self._edges[number][axis]
                seen = matrix[:, choice[other]] if other < node else matrix.min(axis=1)
                total = total + seen
            choice[node] = int(np.argmin(total))
        return tuple(choice)
