"""The sharding problem within a memory limit: Lagrangian relaxation, then branch and bound.

With a price ``lambda_t >= 0`` per byte at time t, the relaxed problem

    v(lambda) = min over choices of  cost + sum_t lambda_t (bytes_t - limit)

is a sharding problem without memory; v is a lower bound, and its maximum over lambda
(``prices``) that of the best convex relaxation (Geoffrion 1974). Every choice on the way is noted
(``memory_search``). HiGHS closes the gap that is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.bound import approach, dual_bound, prune
from alpa.passes.solve.sharding.fit import without_oversized
from alpa.passes.solve.sharding.forests import ForestSearch
from alpa.passes.solve.sharding.fuse import combine
from alpa.passes.solve.sharding.memory_search import MemorySearch, SolveFree
from alpa.passes.solve.sharding.mip import branch
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.prices import next_prices, priced
from alpa.passes.solve.sharding.problem import (
    InfeasibleError,
    Memory,
    OutOfMemoryError,
    Problem,
)
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


def solve_within(
    problem: Problem,
    solve_free: SolveFree,
    *,
    deadline: float,
    free_gap: float,
    gap: float,
    settings: Settings = DEFAULT,
) -> tuple[tuple[int, ...], float, bool]:
    """The cheapest choice within memory, as far as the deadline lets, a bound, and whether that
    holds for choices that exceed the memory, too.

    The gaps, as parts of the cost, are those wanted where memory does not bind and where it does.
    Raises ``OutOfMemoryError``, and ``TimeoutError`` where no choice within memory was found in
    time.
    """
    try:
        fitting = without_oversized(problem, settings=settings)
        costs = zip(fitting.node_costs, problem.node_costs, strict=True)
        is_free = all(left is given for left, given in costs)
        reduction = Reduction(fitting, settings).run(deadline=deadline)
        rest = reduction.rest()
        if not rest.nodes:
            return *_only(problem, reduction.lift()), is_free
        search = MemorySearch(rest.problem, solve_free, deadline, gap, settings)
        if not _try_free(search, free_gap):
            is_free = False
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
    choice = reduction.lift(rest.numbered(search.best))
    return choice, min(search.bound, search.value), is_free


def _try_free(search: MemorySearch, gap: float) -> bool:
    """Whether the cheapest choice of all is within memory: then it is the best.

    Where memory binds it is of no use, and that it breaks the limit shows long before. Choices on
    the way that are within memory may be near enough then.
    """
    bare, limit = replace(search.problem, usages=()), search.problem.memory_limit
    tuning, peak = search.settings.tuning, inf
    surely = 1.0 if search.is_large else tuning.surely
    if Step.GLANCE in search.settings.steps:
        glance = approach(bare, near=inf, enough=inf, deadline=inf, settings=search.settings)
        search.bound, search.messages = glance.bound, glance.messages
        peak, _ = search.memory.peak(glance.choice)
        value = bare.cost(glance.choice)
        is_near = value - glance.bound <= tuning.coarse * abs(value)
        if peak > surely * limit or (peak > limit and is_near):
            search.see(glance.choice, far=True)
            return False
        if peak <= limit:
            search.take(glance.choice)
    wanted = [gap] if peak <= limit else [max(gap, tuning.coarse), gap]
    for near in wanted:
        found = search.solve_free(bare, near)
        search.bound = max(search.bound, found.bound)
        if search.memory.peak(found.choice)[0] > limit:
            search.see(found.choice, far=True)
            return search.closed
        search.take(found.choice)
        if found.gap <= gap:
            break
    return True


def _run(search: MemorySearch) -> None:
    """Takes the steps from cheap to expensive, until the gap is closed."""
    order = list(_STEPS)
    if search.is_large:
        order.insert(0, Step.FORESTS)
    while order:
        step, take = order[0], _STEPS[order.pop(0)]
        if step is Step.EXACT_PRICES and search.is_far and Step.FORESTS in order:
            # They seldom end on a problem this hard.
            order = [Step.FORESTS, step]
            continue
        if step in search.settings.steps:
            take(search)
        if search.done:
            return
    _branch(search)


def _sweep_on(search: MemorySearch) -> None:
    """Raises the bound at the best prices, which were found by looks that ended early."""
    if search.value == inf:
        return
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
    search.see(found.choice)


def _combine(search: MemorySearch) -> None:
    """Looks for a better choice among those made of the strategies of all seen."""
    if search.value == inf:
        return
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
        search.see(found)


def _search_forests(search: MemorySearch) -> None:
    """Looks for better choices by forests: to the deadline where the problem is large, else until
    that finds no more for a while."""
    tuning, now = search.settings.tuning, time.monotonic()
    deadline = now + (1 - tuning.closing) * (search.deadline - now)
    forests = ForestSearch(
        search.problem, search.memory, deadline=deadline, settings=search.settings
    )
    forests.start(search.best)
    search.bound = max(search.bound, min(forests.bound, search.value, forests.value))
    if forests.best is None:
        return
    search.take(tuple(forests.best.tolist()))
    if search.is_large and search.is_far and Step.ROUGH_PRICES in search.settings.steps:
        now = time.monotonic()
        _maximise_bound(search, rough=True, deadline=now + tuning.rough_prices * (deadline - now))
        if search.best is not None and search.value < forests.value:
            forests.restart(search.prices, search.best)
    idle, rounds = 0, forests.improve()
    while idle < tuning.idle_rounds or search.is_large:
        value = forests.value
        if next(rounds, False) is False:
            break
        idle = 0 if forests.value < value else idle + 1
        if forests.value - search.bound <= search.gap * abs(forests.value):
            break
    search.take(tuple(forests.best.tolist()))


def _maximise_bound(search: MemorySearch, *, rough: bool, deadline: float = inf) -> None:
    """Looks for the prices of the best bound; ``rough`` ones are found by dual ascent alone."""
    deadline = min(deadline, search.deadline)
    limit, tuning = search.problem.memory_limit, search.settings.tuning
    ceiling = inf if search.value < inf else 10 * max(abs(search.bound), 1e-30) / max(limit, 1.0)
    inherited = None if search.planes else dict(search.prices)
    idle = 0
    for _ in range(tuning.price_rounds):
        if search.closed or time.monotonic() > deadline:
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
                deadline=deadline,
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
        search.see(found.choice)
        if any(price >= 0.999 * ceiling for price in prices.values()):
            ceiling *= 10
        elif len(search.prices) > known:
            idle = 0
        elif idle == tuning.patience:
            return


def _run_without_dear(search: MemorySearch) -> None:
    """Goes on with the strategies and pairs that alone cost less than the best choice."""
    try:
        slack = search.value - dual_bound(search.problem) + 1e-9 * abs(search.value)
        smaller, _ = prune(search.problem, slack)
        reduction = Reduction(smaller, search.settings).run(deadline=search.deadline)
        rest = reduction.rest()
        if not rest.nodes:
            choice = reduction.lift()
            if search.memory.peak(choice)[0] <= search.problem.memory_limit:
                search.offer(choice)
            search.bound = search.value
            return
        below = MemorySearch(
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
        search.offer(reduction.lift(rest.numbered(below.best)))
    search.bound = max(search.bound, min(below.bound, search.value))


def _branch(search: MemorySearch) -> None:
    """Closes the gap by branch and bound."""
    problem = search.problem
    while True:
        try:
            found = branch(
                problem,
                deadline=search.deadline,
                relative_gap=search.gap,
                times=search.prices,
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
        search.see(found.choice)
        search.bound = min(max(search.bound, found.bound), search.value)
        if len(search.prices) == known:
            return


_STEPS: dict[Step, Callable[[MemorySearch], None]] = {
    Step.ROUGH_PRICES: partial(_maximise_bound, rough=True),
    Step.MORE_SWEEPS: _sweep_on,
    Step.COMBINATION: _combine,
    Step.EXACT_PRICES: partial(_maximise_bound, rough=False),
    Step.FORESTS: _search_forests,
}


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
