from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice, product
from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.exchange import Pricing, parts, take_parts
from alpa.passes.solve.sharding.flat import Flat
from alpa.passes.solve.sharding.forests import ForestSearch
from alpa.passes.solve.sharding.ilp import Edge, Problem, Step, Tuning, Usage, solve
from alpa.passes.solve.sharding.prices import priced
from alpa.passes.solve.sharding.problem import Memory
from alpa.passes.solve.sharding.settings import DEFAULT


def tight_problem(seed: int, nodes: int = 8) -> Problem:
    """Cheap strategies hold much; some bytes are of a pair; the limit is near the least peak."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 4, size=nodes)
    ends = [(k - 1, k) for k in range(1, nodes)] + [(0, nodes - 1), (1, 4), (2, 6)]
    held = [np.sort(rng.integers(1, 20, size=size))[::-1].astype(float) for size in sizes]
    usages = [
        Usage(nodes=(v,), bytes=held[v], start=v, stop=int(v + rng.integers(1, 5)))
        for v in range(nodes)
    ]
    shared = rng.integers(0, 5, size=(sizes[2], sizes[3])).astype(float)
    usages.append(Usage(nodes=(2, 3), bytes=shared, start=3, stop=6))
    problem = Problem(
        node_costs=tuple(np.sort(rng.random(size)) for size in sizes),
        edges=tuple(Edge(u, v, rng.random((sizes[u], sizes[v]))) for u, v in ends),
        usages=tuple(usages),
    )
    memory = Memory(problem)
    peaks = [memory.peak(choice)[0] for choice in product(*map(range, sizes))]
    return replace(problem, memory_limit=float(np.quantile(peaks, 0.05)))


def fitting(problem: Problem) -> list[tuple[int, ...]]:
    """All choices within memory, the cheapest first."""
    memory = Memory(problem)
    every = product(*(range(costs.size) for costs in problem.node_costs))
    fit = [choice for choice in every if memory.peak(choice)[0] <= problem.memory_limit]
    return sorted(fit, key=problem.cost)


def optimum(problem: Problem) -> float:
    return problem.cost(fitting(problem)[0])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("large", [0, 5000])
def test_the_search_ends_near_the_optimum(seed, large):
    problem = tight_problem(seed)
    memory = Memory(problem)
    settings = replace(DEFAULT, tuning=Tuning(large=large))
    search = ForestSearch(problem, memory, deadline=time.monotonic() + 60, settings=settings)
    search.start(None)
    for _ in islice(search.improve(), 30):
        pass
    assert search.best is not None
    choice = tuple(search.best.tolist())
    best = optimum(problem)
    assert memory.peak(choice)[0] <= problem.memory_limit
    assert search.value == pytest.approx(problem.cost(choice))
    assert search.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= search.value <= 1.1 * best


def test_noise_leads_out_of_a_local_optimum():
    problem = tight_problem(0, 10)
    values: list[float] = []
    for balls in (0, 3):
        settings = replace(DEFAULT, tuning=Tuning(balls=balls))
        search = ForestSearch(
            problem, Memory(problem), deadline=time.monotonic() + 60, settings=settings
        )
        search.start(None)
        for _ in islice(search.improve(), 30):
            pass
        values.append(search.value)
    assert values[1] == pytest.approx(optimum(problem))
    assert values[0] > values[1] * 1.005


@pytest.mark.parametrize("seed", range(3))
def test_solve_with_forests_first(seed):
    """Every problem is large, and no other step is left."""
    problem = tight_problem(seed)
    found = solve(problem, steps=[Step.FORESTS], tuning=Tuning(large=0), time_limit=1.0)
    assert found.bound <= optimum(problem) * (1 + 1e-9)
    assert found.objective <= 1.1 * optimum(problem)


def test_a_restart_takes_a_better_choice():
    problem = tight_problem(0)
    best, *_, worst = fitting(problem)
    search = ForestSearch(problem, Memory(problem), deadline=-inf, settings=DEFAULT)
    search.start(worst)
    search.restart({}, best)
    assert search.value == pytest.approx(problem.cost(best))


def test_fusing_with_noisy_choices_gains():
    """A step of its own: in the search, forests find the best before it is taken."""
    problem = tight_problem(0, 10)
    every = fitting(problem)
    search = ForestSearch(
        problem, Memory(problem), deadline=time.monotonic() + 60, settings=DEFAULT
    )
    search.restart({}, every[-1])
    search._charge(sweeps=0)
    before = search.value
    for _ in range(5):
        search._fuse_noisy(search.best)
    assert search.value < before


@pytest.mark.parametrize("seed", range(3))
def test_a_large_problem_far_from_its_bound_restarts_at_rough_prices(seed):
    problem = tight_problem(seed)
    found = solve(
        problem,
        steps=[Step.FORESTS, Step.ROUGH_PRICES],
        tuning=Tuning(large=0, wide_gap=0.0),
        time_limit=2.0,
    )
    assert found.bound <= optimum(problem) * (1 + 1e-9)
    assert found.objective <= 1.1 * optimum(problem)


def test_a_known_choice_is_kept_where_nothing_better_is_found():
    """Prices never lead to a choice that fits: there is no time for it."""
    problem = tight_problem(0)
    memory = Memory(problem)
    known = next(
        choice
        for choice in product(*(range(costs.size) for costs in problem.node_costs))
        if memory.peak(choice)[0] <= problem.memory_limit
    )
    search = ForestSearch(problem, memory, deadline=-inf, settings=DEFAULT)
    search.start(known)
    assert search.value <= problem.cost(known)


@pytest.mark.parametrize("seed", range(3))
def test_prices_make_the_same_costs_as_a_priced_problem(seed):
    problem = tight_problem(seed)
    memory, rng = Memory(problem), np.random.default_rng(seed)
    prices = rng.random(len(memory.times))
    flat = Flat(problem)
    costs, entries = Pricing(flat, problem, memory).at(prices)
    other = priced(problem, memory, dict(zip(memory.times.tolist(), prices, strict=True)))
    for _ in range(5):
        choice = np.array([int(rng.integers(c.size)) for c in problem.node_costs])
        for ends in (flat.forward, flat.twin[flat.forward]):
            cost = costs[flat.begins + choice].sum() + entries[flat.pairs(ends, choice)].sum()
            assert cost == pytest.approx(other.cost(choice.tolist()))


def test_the_problem_of_other_costs():
    problem = tight_problem(1)
    flat, rng = Flat(problem), np.random.default_rng(1)
    same = flat.problem(flat.costs, flat.entries)
    for _ in range(10):
        choice = tuple(int(rng.integers(c.size)) for c in problem.node_costs)
        assert same.cost(choice) == pytest.approx(problem.cost(choice))


@pytest.mark.parametrize("seed", range(10))
def test_parts_add_up_and_fit(seed):
    problem = tight_problem(seed)
    memory, flat, rng = Memory(problem), Flat(problem), np.random.default_rng(seed)
    old, new = (np.array([int(rng.integers(c.size)) for c in problem.node_costs]) for _ in range(2))
    found = parts(flat, flat.costs, flat.entries, old, new)
    assert found.gains.sum() == pytest.approx(flat.cost(old) - flat.cost(new))
    used = memory.over_time(old)
    limit = float(max(used.max(), memory.over_time(new).max()))
    everything = replace(found, gains=np.abs(found.gains))
    choice, after = take_parts(everything, memory, limit, old, new, used)
    assert after == pytest.approx(memory.over_time(choice))
    assert after.max() <= limit
    lower = float(used.max()) - 1
    choice, after = take_parts(found, memory, lower, old, new, used)
    assert after == pytest.approx(memory.over_time(choice))
    # What breaks the limit already never grows, and what gains nothing is not taken.
    assert (after <= np.maximum(lower, used)).all()
    assert flat.cost(choice) <= flat.cost(old) + 1e-12
    moved = np.unique(found.part[choice[found.nodes] != old[found.nodes]])
    assert (found.gains[moved] >= 0).all()
