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

from alpa.passes.solve.sharding.flat import Flat
from alpa.passes.solve.sharding.fuse import fuse
from alpa.passes.solve.sharding.messages import Messages
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
        found, shifted = state.bound()
        bound = max(bound, found)
        closed = value - bound <= gap * abs(value) or bound >= enough
        if closed or bound - last <= tuning.stall * (value - bound) or time.monotonic() > deadline:
            break
        if _share_above(state.flat, shifted, value - bound) > tuning.enough_pruned:
            break
        last = bound
    problem = state.problem()
    return Bounded(problem=problem, bound=min(dual_bound(problem), value), choice=best, value=value)


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
    near to the bound, or where too little of what is between them is gained. Then choices are read
    off after each of some more sweeps, until one is near. ``messages``: of the same nodes and edges
    at other costs. From there it is a few sweeps where ``ascend`` starts anew. ``known`` choices
    are fused with what is read off the shifts.
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
    best, late = read[-1], 0
    while gap > 0 and bound < enough and not value - bound <= gap * abs(value):
        # No choice is near, though the bound hardly grows: that is seldom the bound's fault.
        if late >= tuning.late_sweeps or time.monotonic() > deadline:
            break
        read = [best]
        for _ in range(tuning.late_choices):
            state.sweep(forward=True)
            read.append(state.improve(state.round(forward=False)))
            state.sweep(forward=False)
            read.append(state.improve(state.round(forward=True)))
        late += tuning.late_choices
        bound = max(bound, state.bound()[0] + reduction.constant)
        usable = [choice for choice in read if problem.cost(choice) < inf]
        if usable:
            best = state.improve(fuse(problem, usable, settings=settings))
            value = problem.cost(best) + reduction.constant
    choice = reduction.lift(core.numbered(best))
    return Approached(bound=bound, choice=choice, messages=state, reduction=reduction, core=core)


def least(problem: Problem, *, near: float, settings: Settings = DEFAULT) -> float:
    """A lower bound alone, by sweeps until they gain less than ``near``."""
    reduction = Reduction(problem, settings)
    state = Messages(reduction.eliminate_all().problem, settings=settings)
    last, bound = -inf, state.bound()[0]
    while bound - last > near:
        for _ in range(settings.tuning.approach_sweeps):
            state.sweep(forward=True)
            state.sweep(forward=False)
        last, bound = bound, state.bound()[0]
    return bound + reduction.constant


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


def _share_above(flat: Flat, costs: np.ndarray, slack: float) -> float:
    """The part of the strategies that ``prune`` would forbid."""
    least = np.minimum.reduceat(costs, flat.begins)
    return float(np.mean(costs > np.repeat(least + slack, flat.sizes)))


def neighbours(problem: Problem) -> list[list[tuple[int, int, int]]]:
    """Per node: (edge, the node's axis in its matrix, the other end)."""
    around: list[list[tuple[int, int, int]]] = [[] for _ in problem.node_costs]
    for number, edge in enumerate(problem.edges):
        around[edge.source].append((number, 0, edge.target))
        around[edge.target].append((number, 1, edge.source))
    return around
