"""Choices that trade cost for memory: the fastest one, and the best ones at prices of a byte.

Dual ascent (`bound.approach`) goes on from one price to the next, on the problem as it is: a
presolve would take as long. Only strategies that are forbidden go first, which leaves little where
a baseline forbids most. Where a choice is not near enough to its bound, the solver goes on from
there, but without branch and bound: that takes its time limit and seldom finds more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from alpa.passes.solve.sharding.bound import Messages, approach, dual_bound
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.prices import priced
from alpa.passes.solve.sharding.problem import Memory, Problem
from alpa.passes.solve.sharding.settings import ALL, DEFAULT, Settings, Step, Tuning


def solve(
    problem: Problem,
    prices: Sequence[float],
    *,
    gap: float,
    time_limit: float,
    enough: float = inf,
    is_small: Callable[[tuple[int, ...]], bool] = lambda _: False,
    steps: Collection[Step] = ALL,
    tuning: Tuning = DEFAULT.tuning,
) -> list[tuple[int, ...]]:
    """The choice of least cost, and for each price that of least
    cost + price * bytes / ``memory_limit`` * C.

    C is the least cost, so that a price has no unit: it says how many times the cost of the
    fastest choice a full memory is worth. Bytes are those at the first time of the usages. Each
    choice is proven to be within ``gap`` of the best, or as near as the relaxation is, where that
    ends within ``time_limit`` seconds. Where all choices cost more than ``enough``, one of them is
    returned alone, whichever is near; where the fastest one ``is_small``, it is alone, too.
    Raises ``InfeasibleError``, ``TimeoutError`` and ``SolverFailedError`` as ``ilp.solve``.
    """
    settings = Settings(steps=steps, tuning=tuning)
    if all(np.isfinite(costs).all() for costs in problem.node_costs):
        return _solve(problem, prices, gap, time_limit, enough, is_small, settings)
    reduction = Reduction(problem, settings).run()
    rest = reduction.rest()
    if not rest.nodes:
        return [reduction.lift()] * (1 + len(prices))

    def lifted(choice: Sequence[int]) -> tuple[int, ...]:
        return reduction.lift(rest.numbered(choice))

    found = _solve(
        rest.problem,
        prices,
        gap,
        time_limit,
        enough,
        lambda choice: is_small(lifted(choice)),
        settings,
    )
    return list(map(lifted, found))


def _solve(
    problem: Problem,
    prices: Sequence[float],
    gap: float,
    time_limit: float,
    enough: float,
    is_small: Callable[[tuple[int, ...]], bool],
    settings: Settings,
) -> list[tuple[int, ...]]:
    memory = Memory(problem)
    times = memory.times[:1].tolist()
    fastest, messages = _near(replace(problem, usages=()), gap, time_limit, enough, settings)
    if messages is None or is_small(fastest):
        return [fastest]
    unit = problem.cost(fastest) / problem.memory_limit
    choices = [fastest]
    for price in prices:
        dear = priced(problem, memory, dict.fromkeys(times, price * unit))
        choice, messages = _near(dear, gap, time_limit, inf, settings, choices[-1:], messages)
        choices.append(choice)
    return choices


def _near(
    problem: Problem,
    gap: float,
    time_limit: float,
    enough: float,
    settings: Settings,
    known: Sequence[tuple[int, ...]] = (),
    messages: Messages | None = None,
) -> tuple[tuple[int, ...], Messages | None]:
    """A choice within the gap of the best, without memory, and where dual ascent arrived; None
    where the bound is enough."""
    near = settings.tuning.pareto_gain * gap * max(dual_bound(problem), 0.0)
    found = approach(
        problem,
        near=near,
        enough=enough,
        deadline=inf,
        gap=gap,
        known=known,
        messages=messages,
        settings=settings,
    )
    cost, bound = problem.cost(found.choice), found.bound
    if cost < inf and (cost - bound <= gap * cost or bound >= enough):
        return found.choice, found.messages if bound < enough else None
    from alpa.passes.solve.sharding import ilp  # noqa: PLC0415 - costs start-up time, seldom needed

    if cost == inf:
        solution = ilp.solve(
            problem,
            time_limit=time_limit,
            relative_gap=gap,
            branch_gap=gap,
            steps=settings.steps,
            tuning=settings.tuning,
        )
        return solution.choice, found.messages
    # Where sweeps are slow, the linear relaxation is faster. What it leaves open stays open.
    solution = ilp.solve(
        found.messages.problem(),
        time_limit=time_limit,
        relative_gap=gap,
        branch_gap=inf,
        known=found.core.of(found.choice),
        enough=enough - found.reduction.constant,
        steps=settings.steps,
        tuning=replace(settings.tuning, sweeps=1),
    )
    bound = solution.bound + found.reduction.constant
    return found.lift(solution.choice), found.messages if bound < enough else None
