from __future__ import annotations

from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.bound import Messages, approach, ascend, dual_bound, prune
from alpa.passes.solve.sharding.ilp import Edge, Problem


@pytest.mark.parametrize("seed", range(5))
def test_bound_and_shift(all_costs, random_problem, seed):
    problem = random_problem(seed, nodes=6)
    costs = all_costs(problem)
    found = ascend(problem, sweeps=50, gap=1e-9, deadline=inf)
    assert dual_bound(problem) <= found.bound <= costs.min() * (1 + 1e-12)
    assert found.value == pytest.approx(costs[found.choice])
    assert all_costs(found.problem) == pytest.approx(costs, rel=1e-9)


def test_bound_is_tight_on_a_tree():
    rng = np.random.default_rng(0)
    edges = tuple(Edge((k - 1) // 2, k, rng.random((4, 4))) for k in range(1, 12))
    problem = Problem(node_costs=tuple(rng.random(4) for _ in range(12)), edges=edges)
    found = ascend(problem, sweeps=50, gap=1e-9, deadline=inf)
    assert found.bound == pytest.approx(found.value, rel=1e-9)


@pytest.mark.parametrize("gap", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_approach_bounds_the_optimum(all_costs, random_problem, seed, gap):
    problem = random_problem(seed)
    found = approach(problem, near=0.0, enough=inf, deadline=inf, gap=gap)
    cost, best = problem.cost(found.choice), all_costs(problem).min()
    assert found.bound <= best * (1 + 1e-9) <= cost * (1 + 2e-9)
    assert found.lift(found.core.of(found.choice)) == found.choice


def test_approach_ends_within_the_gap(random_problem):
    problem = random_problem(1, nodes=12)
    exact, wide = (
        approach(problem, near=0.0, enough=inf, deadline=inf, gap=gap) for gap in (0.0, 0.5)
    )
    cost = problem.cost(wide.choice)
    assert cost - wide.bound <= 0.5 * cost
    assert wide.bound < exact.bound


@pytest.mark.parametrize("seed", range(5))
def test_prune_keeps_every_better_choice(all_costs, random_problem, seed):
    problem = random_problem(seed, nodes=6)
    costs = all_costs(problem)
    found = ascend(problem, sweeps=50, gap=1e-9, deadline=inf)
    value = np.sort(costs, axis=None)[3]
    pruned, gone = prune(found.problem, value - dual_bound(found.problem) + 1e-12)
    left = all_costs(pruned)
    assert np.isfinite(left[costs <= value]).all()
    assert gone == sum(int(np.isinf(c).sum()) for c in pruned.node_costs)


def test_prune_forbids_the_rest():
    problem = Problem(node_costs=(np.array([0.0, 1.0, 5.0]),), edges=())
    pruned, gone = prune(problem, 1.0)
    assert gone == 1
    assert pruned.node_costs[0].tolist() == [0.0, 1.0, inf]


def test_improve_ends_where_no_single_change_helps(random_problem):
    problem = random_problem(3)
    choice = Messages(problem).improve((0,) * 7)
    for node in range(7):
        for other in range(4):
            changed = (*choice[:node], other, *choice[node + 1 :])
            assert problem.cost(changed) >= problem.cost(choice) - 1e-15
