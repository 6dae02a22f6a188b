"""Choices that trade cost for memory: the best ones at several prices of a byte.

One presolve serves all prices: it knows memory, so it keeps what is best at any of them. Dual
ascent then goes on from one price to the next (`shard_bound.approach`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from alpa.passes.solve import shard_ilp
from alpa.passes.solve.shard_bound import Messages, approach, dual_bound
from alpa.passes.solve.shard_fixing import priced
from alpa.passes.solve.shard_presolve import Reduction
from alpa.passes.solve.shard_problem import Memory, Problem

_NEAR = 0.1
"""Sweeps end when they gain less than this part of the gap."""


def solve_at_prices(
    problem: Problem, prices: Sequence[float], *, gap: float, time_limit: float
) -> list[tuple[int, ...]]:
    """For each price the choice of least cost + price * bytes / ``memory_limit`` * C.

    C is the least cost, so that a price has no unit: it says how many times the cost of the
    fastest choice a full memory is worth. Bytes are those at the first time of the usages. Each
    choice is proven to be within ``gap`` of the best, or as near as ``time_limit`` seconds admit.
    Raises ``InfeasibleError``, ``TimeoutError`` and ``SolverFailedError`` as ``shard_ilp.solve``.
    """
    reduction = Reduction(problem).run()
    rest = reduction.rest()
    if not rest.nodes:
        return [reduction.lift()] * len(prices)
    small, memory = rest.problem, Memory(rest.problem)
    times = memory.times[:1].tolist()
    messages: Messages | None = None
    choices: list[tuple[int, ...]] = []

    def choose(price: float) -> tuple[int, ...]:
        nonlocal messages
        relaxed = priced(small, memory, dict.fromkeys(times, price))
        near = _NEAR * gap * max(dual_bound(relaxed), 0.0)
        found = approach(
            relaxed, near=near, enough=inf, deadline=inf, known=choices[-1:], messages=messages
        )
        messages = found.messages
        cost = relaxed.cost(found.choice)
        if cost - found.bound <= gap * cost:
            return found.choice
        known = found.choice if cost < inf else None
        return shard_ilp.solve(
            relaxed, time_limit=time_limit, relative_gap=gap, branch_gap=gap, known=known
        ).choice

    free = choose(0.0)
    unit = small.cost(free) / problem.memory_limit
    for price in prices:
        choices.append(choose(price * unit) if price > 0 else free)
    return [reduction.lift(rest.numbered(choice)) for choice in choices]
