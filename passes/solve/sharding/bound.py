"""Lower bounds and good choices for the sharding problem by dual ascent.

The dual of the LP relaxation moves costs between nodes and edges: ``theta_v(i) + m(i)`` and
``theta_uv(i, j) - m(i)`` cost the same for every choice. For any such shift

    sum_v min_i theta_v(i) + sum_uv min_ij theta_uv(i, j)  <=  optimum.

The sweeps are those of sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006): each
visit gathers a node's share of its edges and hands it on to the edges ahead. The bound never
falls. It may stop short of the optimum: then ``mip`` takes over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from alpa.passes.solve.sharding.fuse import fuse
from alpa.passes.solve.sharding.presolve import Core, Reduction
from alpa.passes.solve.sharding.problem import Edge, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


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


def ascend(
    problem: Problem,
    *,
    sweeps: int,
    gap: float,
    deadline: float,
    enough: float = inf,
    settings: Settings = DEFAULT,
) -> Bounded:
    """At most ``sweeps`` double sweeps; stops at a relative ``gap``, a stall, or enough to prune.

    And where the bound is ``enough``.

    Every strategy must be finite and have an allowed partner on each edge, as presolve leaves it.
    """
    tuning = settings.tuning
    state = Messages(problem, settings=settings)
    best: tuple[int, ...] = (0,) * len(problem.node_costs)
    value, bound, last = inf, -inf, -inf
    read: list[tuple[int, ...]] = []
    next_look = tuning.look_every
    for sweep in range(1, sweeps + 1):
        look = sweep in (next_look, sweeps)
        for forward in (True, False):
            state.sweep(forward=forward)
            if look:
                read.append(state.improve(state.round(forward=not forward)))
        if not look:
            continue
        next_look = max(sweep + tuning.look_every, int(sweep * tuning.look_growth))
        read = read[-tuning.fused_roundings :]
        known = [choice for choice in (best, *read) if problem.cost(choice) < inf]
        if known:
            best = state.improve(fuse(problem, known, settings=settings))
            value = problem.cost(best)
        found, nodes = state.bound()
        bound = max(bound, found)
        closed = value - bound <= gap * abs(value) or bound >= enough
        if closed or bound - last <= tuning.stall * (value - bound) or time.monotonic() > deadline:
            break
        if _share_above(nodes, value - bound) > tuning.enough_pruned:
            break
        last = bound
    shifted = state.problem()
    return Bounded(problem=shifted, bound=min(dual_bound(shifted), value), choice=best, value=value)


@dataclass(frozen=True, kw_only=True, eq=False)
class Approached:
    """A bound and a choice near the optimum, and the shifts from which to go on."""

    bound: float
    choice: tuple[int, ...]
    messages: Messages
    """of what is left when nodes with at most two neighbours are minimised out"""
    reduction: Reduction
    core: Core
    """what is left"""

    def lift(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The whole problem's choice from one of what is left."""
        return self.reduction.lift(self.core.numbered(choice))


def approach(
    problem: Problem,
    *,
    near: float,
    enough: float,
    deadline: float,
    gap: float = 0.0,
    known: Sequence[tuple[int, ...]] = (),
    messages: Messages | None = None,
    settings: Settings = DEFAULT,
) -> Approached:
    """Sweeps until that gains less than ``near`` or the bound is ``enough``, and one choice.

    With a relative ``gap``, choices are read off on the way: sweeps also end where one is that
    near to the bound, or where too little of what is between them is gained. ``messages``: of the
    same nodes and edges at other costs. From there it is a few sweeps where ``ascend`` starts anew.
    ``known`` choices are fused with what is read off the shifts.
    """
    steps, tuning = settings.steps, settings.tuning
    reduction = Reduction(problem, settings)
    core = reduction.eliminate_all()
    problem = core.problem
    read = [core.of(choice) for choice in known] if Step.FUSION_OF_SEEN in steps else []
    state = Messages(problem, messages if Step.WARM_START in steps else None, settings=settings)
    bound, last, value = -inf, -inf, inf
    sweeps, next_look = 0, tuning.first_choices if gap > 0 else inf
    while True:
        for _ in range(tuning.approach_sweeps):
            state.sweep(forward=True)
            state.sweep(forward=False)
        sweeps += tuning.approach_sweeps
        last, bound = bound, state.bound()[0] + reduction.constant
        slow = value < inf and bound - last <= tuning.slow * (value - bound)
        ends = not bound - last > near or slow or bound >= enough or time.monotonic() > deadline
        if not ends and sweeps < next_look:
            continue
        next_look = 2 * sweeps
        read.append(state.improve(state.round(forward=True)))
        state.sweep(forward=True)
        read.append(state.improve(state.round(forward=False)))
        usable = [choice for choice in read if problem.cost(choice) < inf]
        if usable:
            usable = usable[-tuning.fused_roundings :]
            read.append(state.improve(fuse(problem, usable, settings=settings)))
            value = problem.cost(read[-1]) + reduction.constant
        if ends or value - bound <= gap * abs(value):
            break
    choice = reduction.lift(core.numbered(read[-1]))
    return Approached(bound=bound, choice=choice, messages=state, reduction=reduction, core=core)


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
    return replace(shifted, node_costs=nodes, edges=edges), gone


def _share_above(nodes: Sequence[np.ndarray], slack: float) -> float:
    """The part of the node strategies that ``prune`` would forbid."""
    above = sum(int((costs > costs.min() + slack).sum()) for costs in nodes)
    return above / sum(costs.size for costs in nodes)


def neighbours(problem: Problem) -> list[list[tuple[int, int, int]]]:
    """Per node: (edge, the node's axis in its matrix, the other end)."""
    around: list[list[tuple[int, int, int]]] = [[] for _ in problem.node_costs]
    for number, edge in enumerate(problem.edges):
        around[edge.source].append((number, 0, edge.target))
        around[edge.target].append((number, 1, edge.source))
    return around


class Messages:
    """The shifts of a problem: ``theta_uv(i, j) + m_u(i) + m_v(j)``, the same off the nodes.

    A visit works on all edges of a node at once: their matrices lie side by side, and so do the
    shifts at their other ends, in one vector for the whole problem.
    """

    def __init__(
        self, problem: Problem, begin: Messages | None = None, *, settings: Settings = DEFAULT
    ) -> None:
        """``begin`` with the shifts of a problem with the same nodes and edges."""
        self._problem = problem
        self._rounds = settings.tuning.descent_rounds if Step.DESCENT in settings.steps else 0
        # Neighbours ahead stand behind the others, in any sweep's way.
        around = [sorted(mine, key=lambda end: end[2]) for mine in neighbours(problem)]
        sizes = [costs.size for costs in problem.node_costs]
        # Each node's stretch of the vector: the shifts at the other ends of its edges, in turn.
        starts = [np.cumsum([0, *(sizes[other] for _, _, other in mine)]) for mine in around]
        offsets = np.cumsum([0, *(int(ends[-1]) for ends in starts)])
        self._shifts: np.ndarray = np.zeros(int(offsets[-1]))
        if begin is not None:
            self._shifts[:] = begin._shifts
        self._first: list[tuple[int, int]] = [(0, 0)] * len(problem.edges)
        """per edge, where the shifts at its source and at its target begin"""
        at = [
            {
                (number, axis): int(offset + k)
                for (number, axis, _), k in zip(mine, begins[:-1], strict=True)
            }
            for mine, begins, offset in zip(around, starts, offsets[:-1], strict=True)
        ]
        for number, edge in enumerate(problem.edges):
            # A node's own shifts stand in the stretches of its neighbours.
            self._first[number] = (at[edge.target][number, 1], at[edge.source][number, 0])
        self._nodes = [
            _Node.of(problem, node, mine, begins[:-1], int(offset), self._first)
            for node, (mine, begins, offset) in enumerate(
                zip(around, starts, offsets[:-1], strict=True)
            )
        ]

    def sweep(self, *, forward: bool) -> None:
        for node in self._nodes if forward else reversed(self._nodes):
            if not len(node.others):
                continue
            least = node.least(self._shifts)
            share = (node.costs + np.add.reduce(least)) / node.parts
            np.negative(least, out=least)
            ahead = least[node.behind :] if forward else least[: node.behind]
            ahead += share
            self._shifts[node.own] = least

    def bound(self) -> tuple[float, list[np.ndarray]]:
        """``dual_bound(self.problem())``, and the shifted costs of nodes, without the matrices."""
        bound, nodes = 0.0, list[np.ndarray]()
        for node in self._nodes:
            own = self._shifts[node.own]
            nodes.append(node.costs - np.add.reduce(own))
            bound += float(nodes[-1].min())
            if node.behind < len(node.others):
                edges = node.least(self._shifts)[node.behind :] + own[node.behind :]
                bound += float(edges.min(axis=1).sum())
        return bound, nodes

    def problem(self) -> Problem:
        edges: list[Edge] = []
        nodes = [costs.astype(float) for costs in self._problem.node_costs]
        for (here, there), edge in zip(self._first, self._problem.edges, strict=True):
            source = self._shifts[here : here + edge.costs.shape[0]]
            target = self._shifts[there : there + edge.costs.shape[1]]
            edges.append(Edge(edge.source, edge.target, edge.costs + source[:, None] + target))
            nodes[edge.source] = nodes[edge.source] - source
            nodes[edge.target] = nodes[edge.target] - target
        return Problem(node_costs=tuple(nodes), edges=tuple(edges))

    def round(self, *, forward: bool) -> tuple[int, ...]:
        """Node by node the best strategy, given those chosen and the best of those to come.

        Goes against the last sweep, which has left each node what is behind it.
        """
        choice = np.zeros(len(self._nodes), dtype=int)
        order = range(len(self._nodes))
        for number in order if forward else reversed(order):
            node = self._nodes[number]
            seen = node.costs
            if len(node.others):
                below, above = slice(None, node.behind), slice(node.behind, None)
                done, ahead = (below, above) if forward else (above, below)
                chosen = node.begins[done] + choice[node.others[done]]
                least = node.least(self._shifts)[ahead]
                seen = seen + least.sum(axis=0) + node.matrix[chosen].sum(axis=0)
            choice[number] = int(np.argmin(seen))
        return tuple(choice.tolist())

    def improve(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Changes one node at a time while that lowers the cost, as the problem has it."""
        now = np.array(choice, dtype=int)
        waiting = range(len(self._nodes))
        for _ in range(self._rounds):
            changed: set[int] = set()
            for number in waiting:
                node = self._nodes[number]
                chosen = node.begins + now[node.others]
                costs = node.costs + np.add.reduce(node.matrix[chosen])
                best = int(costs.argmin())
                if costs[best] < costs[now[number]]:
                    now[number] = best
                    changed.update(node.others.tolist())
            if not changed:
                break
            waiting = sorted(changed)
        return tuple(now.tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Node:
    """A node with its edges: ``matrix[k, i]`` is what its strategy i costs with the k-th of the
    neighbours' strategies, which stand one neighbour after the other."""

    costs: np.ndarray
    others: np.ndarray
    """its neighbours, by number"""
    behind: int
    """how many of them have smaller numbers than it has"""
    parts: int
    """that a sweep, in either direction, divides the node's cost into"""
    matrix: np.ndarray
    begins: np.ndarray
    """where each neighbour's strategies begin"""
    stretch: slice
    """of the vector of shifts: those at the neighbours' ends"""
    own: np.ndarray
    """``[neighbour, i]``: where the shifts at this end stand"""

    @classmethod
    def of(
        cls,
        problem: Problem,
        node: int,
        around: list[tuple[int, int, int]],
        begins: np.ndarray,
        offset: int,
        first: list[tuple[int, int]],
    ) -> _Node:
        costs = problem.node_costs[node].astype(float)
        others = np.array([other for _, _, other in around], dtype=int)
        behind = int((others < node).sum())
        matrices = [
            problem.edges[number].costs if axis else problem.edges[number].costs.T
            for number, axis, _ in around
        ]
        matrix = np.concatenate(matrices).astype(float) if around else np.zeros((0, costs.size))
        own = np.array([first[number][axis] for number, axis, _ in around], dtype=int)
        return cls(
            costs=costs,
            others=others,
            behind=behind,
            parts=max(behind, len(others) - behind, 1),
            matrix=matrix,
            begins=begins,
            stretch=slice(offset, offset + len(matrix)),
            own=own[:, None] + np.arange(costs.size),
        )

    def least(self, shifts: np.ndarray) -> np.ndarray:
        """``[neighbour, i]``: the least that each edge costs, without this end's own shifts."""
        shifted = self.matrix + shifts[self.stretch, None]
        return np.minimum.reduceat(shifted, self.begins, axis=0)
