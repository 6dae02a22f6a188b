from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.ilp import Problem, Step, Usage, solve, verify
from alpa.passes.solve.sharding.pareto import solve as solve_prices


def without(step: Step) -> list[Step]:
    return [other for other in Step if other is not step]


def with_memory(problem: Problem, seed: int) -> Problem:
    """Bytes fall where costs rise, and some of them belong to a pair of nodes."""
    rng = np.random.default_rng(seed)
    usages = [
        Usage(nodes=(v,), bytes=1e3 / (1e-4 + costs), start=v % 3, stop=v % 3 + 2)
        for v, costs in enumerate(problem.node_costs)
    ]
    edge = problem.edges[0]
    held = rng.uniform(0, 1e5, edge.costs.shape)
    usages.append(Usage(nodes=(edge.source, edge.target), bytes=held, start=1, stop=2))
    return replace(problem, usages=tuple(usages))


def peaks(problem: Problem) -> np.ndarray:
    shape = tuple(costs.size for costs in problem.node_costs)
    peak = np.zeros(shape)
    for time in range(6):
        used = np.zeros(shape)
        for usage in problem.usages:
            if usage.start <= time < usage.stop:
                held = usage.bytes.transpose(np.argsort(usage.nodes))
                used += held.reshape([n if v in usage.nodes else 1 for v, n in enumerate(shape)])
        peak = np.maximum(peak, used)
    return peak


@pytest.mark.parametrize("step", Step)
def test_without_a_step_the_answer_is_weaker_and_never_wrong(all_costs, random_problem, step):
    problem = with_memory(random_problem(0), 0)
    costs, peak = all_costs(problem), peaks(problem)
    low, high = peak.min(), peak.flat[np.argmin(costs)]
    limited = replace(problem, memory_limit=float(low + 0.3 * (high - low)) * (1 + 1e-9))
    best = np.where(peak <= limited.memory_limit, costs, inf).min()
    solution = solve(limited, steps=without(step))
    verify(limited, solution)
    assert solution.bound <= best * (1 + 1e-9)
    assert best <= solution.objective * (1 + 1e-9)
    assert solution.objective == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("step", Step)
def test_without_a_step_the_assignments_of_prices_stay_within_the_gap(
    all_costs, random_problem, step
):
    problem = replace(with_memory(random_problem(1), 1), memory_limit=1e5)
    (fastest,) = solve_prices(problem, [], gap=0.03, time_limit=10.0, steps=without(step))
    best = all_costs(problem).min()
    assert best <= problem.cost(fastest) * (1 + 1e-9)
    if step is not Step.DESCENT:
        assert problem.cost(fastest) <= best / 0.97 * (1 + 1e-9)
