"""The sharding problem within a memory limit: Lagrangian relaxation, then branch and bound.

With a price ``lambda_t >= 0`` per byte at time t, the relaxed problem

    v(lambda) = min over choices of  cost + sum_t lambda_t (bytes_t - limit)

is a sharding problem without memory; v is a lower bound, and its maximum over lambda
(``prices``) that of the best convex relaxation (Geoffrion 1974). Times become rows when a
choice first breaks the limit there. Every choice on the way is repaired and improved
(``repair``). HiGHS closes the gap that is left.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

import numpy as np

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.bound import Messages, approach, dual_bound, prune
from alpa.passes.solve.sharding.combine import combine, rows_at
from alpa.passes.solve.sharding.fit import without_oversized
from alpa.passes.solve.sharding.mip import branch
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.prices import Plane, next_prices, priced
from alpa.passes.solve.sharding.problem import (
    Edge,
    InfeasibleError,
    Memory,
    OutOfMemoryError,
    Problem,
    Solution,
)
from alpa.passes.solve.sharding.repair import improve_within, repair
from alpa.passes.solve.sharding.settings import DEFAULT, Settings


class SolveFree(Protocol):
    """Solves a problem without memory."""

    def __call__(self, other: Problem, wanted: float, enough: float = inf, /) -> Solution:
        """Relaxations go on until the gap is ``wanted`` or the bound ``enough``."""
        ...


@dataclass
class _MemorySearch:
    """What is known about one problem, reduced by presolve."""

    problem: Problem
    solve_free: SolveFree
    deadline: float
    gap: float
    settings: Settings
    best: tuple[int, ...] | None = None
    value: float = inf
    """of the best choice known, be it one of this problem or not"""
    bound: float = -inf
    prices: dict[int, float] = field(default_factory=dict)
    """of the best bound, per byte at each time that is a row"""
    planes: list[Plane] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)
    """choices, as those of ``planes``"""
    messages: Messages | None = None
    """of the last prices that dual ascent alone looked at"""

    def __post_init__(self) -> None:
        self.memory = Memory(self.problem)
        self.index = {int(t): i for i, t in enumerate(self.memory.times)}

    @property
    def done(self) -> bool:
        return self.closed or time.monotonic() > self.deadline

    @property
    def closed(self) -> bool:
        return self.value < inf and self.value - self.bound <= self.gap * abs(self.value)


def solve_within(
    problem: Problem,
    solve_free: SolveFree,
    *,
    deadline: float,
    free_gap: float,
    gap: float,
    settings: Settings = DEFAULT,
) -> tuple[tuple[int, ...], float]:
    """The cheapest choice within memory, as far as the deadline lets, and a bound.

    The gaps, as parts of the cost, are those wanted where memory does not bind and where it does.
    Raises ``OutOfMemoryError``, and ``TimeoutError`` where no choice within memory was found in
    time.
    """
    try:
        fitting = without_oversized(problem, settings=settings)
        reduction = Reduction(fitting, settings).run(deadline=deadline)
        rest = reduction.rest()
        if not rest.nodes:
            return _only(problem, reduction.lift())
        search = _MemorySearch(rest.problem, solve_free, deadline, gap, settings)
        if not _try_free(search, free_gap):
            if _largest_cost(rest.problem) > settings.tuning.never * search.value:
                _run_without_dear(search)
            else:
                _run(search)
    except OutOfMemoryError as error:
        # Said of the reduced problem: name the nodes that were given.
        nodes = _largest(problem, error.time)
        raise OutOfMemoryError(error.needed, error.limit, error.time, nodes) from error
    except InfeasibleError as error:
        # Without the limit there may be a choice; if so, the limit leaves none.
        free = solve_free(replace(problem, usages=()), inf)
        _, moment = Memory(problem).peak(free.choice)
        needed = float(np.nextafter(problem.memory_limit, inf))
        nodes = _largest(problem, moment)
        raise OutOfMemoryError(needed, problem.memory_limit, moment, nodes) from error
    if search.best is None:
        raise TimeoutError(
            "the time limit came before any choice within memory was found; raise it"
        )
    return reduction.lift(rest.numbered(search.best)), min(search.bound, search.value)


def _try_free(search: _MemorySearch, gap: float) -> bool:
    """Whether the cheapest choice of all is within memory: then it is the best.

    Where memory binds it is of no use, and that it breaks the limit shows long before.
    """
    bare, limit = replace(search.problem, usages=()), search.problem.memory_limit
    tuning, peak = search.settings.tuning, inf
    if search.settings.steps.glance:
        glance = approach(bare, near=inf, enough=inf, deadline=inf, settings=search.settings)
        search.bound, search.messages = glance.bound, glance.messages
        peak, _ = search.memory.peak(glance.choice)
        if peak > tuning.surely * limit:
            _see(search, glance.choice, far=True)
            return False
    found = search.solve_free(bare, gap if peak <= limit else max(gap, tuning.coarse))
    if found.gap > gap and search.memory.peak(found.choice)[0] <= limit:
        found = search.solve_free(bare, gap)
    search.bound = max(search.bound, found.bound)
    if search.memory.peak(found.choice)[0] > limit:
        _see(search, found.choice, far=True)
        return False
    search.best, search.value = found.choice, found.objective
    return True


def _run(search: _MemorySearch) -> None:
    steps = search.settings.steps
    if steps.rough_prices:
        _maximise_bound(search, rough=True)
        if search.done:
            return
    if search.value < inf and steps.more_sweeps:
        _sweep_on(search)
        if search.done:
            return
    if search.value < inf and steps.combination:
        _combine(search)
        if search.done:
            return
    if steps.exact_prices:
        _maximise_bound(search, rough=False)
        if search.done:
            return
    _branch(search)


def _sweep_on(search: _MemorySearch) -> None:
    """Raises the bound at the best prices, which were found by looks that ended early."""
    paid = search.problem.memory_limit * sum(search.prices.values())
    found = approach(
        priced(search.problem, search.memory, search.prices),
        near=search.settings.tuning.fine * search.gap * abs(search.bound),
        enough=(1 - search.gap) * search.value + paid,
        deadline=search.deadline,
        known=search.seen[-search.settings.tuning.fused_seen :],
        messages=search.messages,
        settings=search.settings,
    )
    search.messages = found.messages
    search.bound = max(search.bound, min(found.bound - paid, search.value))
    _see(search, found.choice)


def _combine(search: _MemorySearch) -> None:
    closed = search.settings.tuning.combination_gap * search.gap * abs(search.bound)
    found = combine(
        search.problem,
        search.seen,
        search.prices,
        deadline=search.deadline,
        gap=search.gap,
        enough=search.bound + closed,
        settings=search.settings,
    )
    if found is not None:
        _see(search, found)


def _see(search: _MemorySearch, choice: tuple[int, ...], *, far: bool = False) -> None:
    """Notes a choice: a plane, perhaps a new row, perhaps, when repaired, the best so far.

    One that is far above the limit is repaired only if asked: that is slow, and becomes dear.
    """
    used = search.memory.over_time(choice)
    _add_plane(search, choice, used)
    worst = int(np.argmax(used))
    if used[worst] <= search.problem.memory_limit:
        _offer(search, choice)
        return
    if far or used[worst] <= search.settings.tuning.far * search.problem.memory_limit:
        # The first one within memory is worth being late for: it takes a second at most.
        until = search.deadline if search.best is not None else inf
        repaired = repair(
            search.problem, search.memory, choice, deadline=until, settings=search.settings
        )
        if repaired is not None:
            _offer(search, repaired)
    moment = int(search.memory.times[worst])
    if moment not in search.prices:
        search.prices[moment] = 0.0
        if search.value == inf and search.settings.steps.row_check:
            _check_row(search, moment)


def _add_plane(search: _MemorySearch, choice: tuple[int, ...], used: np.ndarray) -> None:
    cost = search.problem.cost(choice)
    if cost < inf:
        search.planes.append(Plane(cost, used))
        search.seen.append(choice)


def _offer(search: _MemorySearch, choice: tuple[int, ...]) -> None:
    """Takes a choice within memory, improved, where it is better than the best."""
    better = improve_within(
        search.problem, search.memory, choice, deadline=search.deadline, settings=search.settings
    )
    cost = search.problem.cost(better)
    if cost < search.value:
        search.best, search.value = better, cost
        _add_plane(search, better, search.memory.over_time(better))


def _check_row(search: _MemorySearch, moment: int) -> None:
    """Looks for the choice that holds least at a time; raises where even that is too much."""
    problem, row = search.problem, search.memory.row(moment)
    least = Problem(
        node_costs=tuple(
            np.where(np.isfinite(costs), row.get((v,), 0.0), inf)
            for v, costs in enumerate(problem.node_costs)
        ),
        edges=(
            *(replace(e, costs=np.where(np.isfinite(e.costs), 0.0, inf)) for e in problem.edges),
            *(Edge(vs[0], vs[1], held) for vs, held in row.items() if len(vs) == 2),
        ),
    )
    try:
        found = search.solve_free(least, 1e-9)
    except TimeoutError:
        return
    if found.bound > problem.memory_limit * (1 + 1e-12):
        raise OutOfMemoryError(found.bound, problem.memory_limit, moment, ())
    _see(search, found.choice)


def _maximise_bound(search: _MemorySearch, *, rough: bool) -> None:
    """Looks for the prices of the best bound; ``rough`` ones are found by dual ascent alone."""
    limit, tuning = search.problem.memory_limit, search.settings.tuning
    ceiling = inf if search.value < inf else 10 * max(abs(search.bound), 1e-30) / max(limit, 1.0)
    inherited = None if search.planes else dict(search.prices)
    idle = 0
    for _ in range(tuning.price_rounds):
        if search.done:
            return
        moments = list(search.prices)
        if inherited is not None:
            upper, prices, inherited = inf, inherited, None
        else:
            at = [search.index[t] for t in moments]
            centre = np.array([search.prices[t] for t in moments])
            step = next_prices(
                search.planes,
                at,
                limit,
                centre,
                search.bound,
                search.value,
                ceiling,
                settings=search.settings,
            )
            if step is None:
                return
            upper, prices = step[0], dict(zip(moments, step[1].tolist(), strict=True))
            if centre.any() and np.allclose(step[1], centre, rtol=1e-9, atol=0.0):
                return
        # Closer than a part of the gap is no use: fixing and branching do the rest.
        near = tuning.gain_of_gap * search.gap * abs(search.bound)
        if search.value < inf:
            near = max(near, tuning.gain * (search.value - search.bound))
            if upper - search.bound <= near:
                return
        paid = limit * sum(prices.values())
        relaxed = priced(search.problem, search.memory, prices)
        enough = (1 - search.gap) * search.value + paid
        if rough:
            found = approach(
                relaxed,
                near=near,
                enough=enough,
                deadline=search.deadline,
                known=search.seen[-tuning.fused_seen :],
                messages=search.messages,
                settings=search.settings,
            )
            search.messages = found.messages
        else:
            wanted = tuning.exactness * near / max(abs(search.bound) + paid, 1e-300)
            try:
                found = search.solve_free(relaxed, max(wanted, 1e-9), enough)
            except TimeoutError:
                return
        value, known = found.bound - paid, len(search.prices)
        idle = 0 if value > search.bound + tuning.idle_gain * near else idle + 1
        if value > search.bound:
            search.bound = value
            search.prices.update(prices)
        _see(search, found.choice)
        if any(price >= 0.999 * ceiling for price in prices.values()):
            ceiling *= 10
        elif len(search.prices) > known:
            idle = 0
        elif idle == tuning.patience:
            return


def _run_without_dear(search: _MemorySearch) -> None:
    """Goes on with the strategies and pairs that alone cost less than the best choice."""
    try:
        slack = search.value - dual_bound(search.problem) + 1e-9 * abs(search.value)
        smaller, _ = prune(search.problem, slack)
        reduction = Reduction(smaller, search.settings).run(deadline=search.deadline)
        rest = reduction.rest()
        if not rest.nodes:
            choice = reduction.lift()
            if search.memory.peak(choice)[0] <= search.problem.memory_limit:
                _offer(search, choice)
            search.bound = search.value
            return
        below = _MemorySearch(
            rest.problem,
            search.solve_free,
            search.deadline,
            search.gap,
            search.settings,
            value=search.value,
            bound=search.bound,
            prices=dict(search.prices),
        )
        _run(below)
    except InfeasibleError:
        search.bound = search.value
        return
    if below.best is not None:
        _offer(search, reduction.lift(rest.numbered(below.best)))
    search.bound = max(search.bound, min(below.bound, search.value))


def _branch(search: _MemorySearch) -> None:
    """Closes the gap by branch and bound."""
    problem = search.problem
    while True:
        try:
            found = branch(
                problem,
                deadline=search.deadline,
                relative_gap=search.gap,
                rows=rows_at(problem, search.prices),
                capacity=min(problem.memory_limit, 1.0),
                settings=search.settings,
            )
        except InfeasibleError as error:
            if search.best is not None:
                raise SolverFailedError("HiGHS found no choice where one is known") from error
            raise
        if found is None:
            return
        cost = problem.cost(found.choice)
        if not cost - found.bound <= max(search.gap, 1e-6) * abs(cost) and not search.done:
            raise SolverFailedError(
                f"HiGHS proved {found.bound} s for a choice that costs {cost} s"
            )
        known = len(search.prices)
        _see(search, found.choice)
        search.bound = min(max(search.bound, found.bound), search.value)
        if len(search.prices) == known:
            return


def _only(problem: Problem, choice: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """The choice that presolve says is best, if it fits: then no other does."""
    peak, moment = Memory(problem).peak(choice)
    if peak > problem.memory_limit:
        raise OutOfMemoryError(peak, problem.memory_limit, moment, ())
    return choice, problem.cost(choice)


def _largest_cost(problem: Problem) -> float:
    """Of a strategy or a pair that is not forbidden."""
    arrays = (*problem.node_costs, *(edge.costs for edge in problem.edges))
    return max(float(a.max(initial=0.0, where=np.isfinite(a))) for a in arrays)


def _largest(problem: Problem, moment: int) -> tuple[int, ...]:
    """The nodes that hold most at a time, whatever they choose."""
    held: dict[int, float] = {}
    for nodes, size in Memory(problem).row(moment).items():
        for node in nodes:
            held[node] = held.get(node, 0.0) + float(size.min())
    return tuple(sorted(held, key=lambda v: -held[v])[:8])
