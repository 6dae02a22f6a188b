from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.sharding.ilp import (
    Edge,
    InfeasibleError,
    Problem,
    Solution,
    Step,
    Tuning,
    solve,
    verify,
)
from alpa.passes.solve.sharding.mip import branch
from alpa.passes.solve.sharding.presolve import Reduction

NO_TABLES = [step for step in Step if step is not Step.TABLES]
# With one sweep of dual ascent, the search then comes to branch and bound.
TO_BRANCHES = [step for step in NO_TABLES if step not in (Step.FIXING, Step.RELAXATION)]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few distinct costs (ties), forbidden entries, parallel edges, several components."""
    cost = st.sampled_from([0.0, 0.0, 1e-6, 2e-6, 3e-4, 1e-2, inf])
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    nodes = [np.array(draw(st.lists(cost, min_size=n, max_size=n))) for n in sizes]
    pairs = [(u, v) for u in range(len(sizes)) for v in range(len(sizes)) if u != v]
    ends = draw(st.lists(st.sampled_from(pairs), max_size=16)) if pairs else []
    edges = []
    for u, v in ends:
        count = sizes[u] * sizes[v]
        costs = draw(st.lists(cost, min_size=count, max_size=count))
        edges.append(Edge(u, v, np.array(costs).reshape(sizes[u], sizes[v])))
    return Problem(node_costs=tuple(nodes), edges=tuple(edges))


@settings(max_examples=250, deadline=None)
@given(problem=problems())
def test_equals_brute_force(all_costs, problem):
    best = all_costs(problem).min()
    if best == inf:
        with pytest.raises(InfeasibleError) as error:
            solve(problem)
        assert error.value.nodes
        return
    solution = solve(problem)
    assert solution.objective == pytest.approx(best, rel=1e-9, abs=1e-18)
    assert solution.bound <= solution.objective
    assert solution.status == "optimal"
    assert solution.gap <= 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_dense_cores_equal_brute_force(all_costs, random_problem, seed):
    problem = random_problem(seed)
    assert Reduction(problem).run().cores()
    solution = solve(problem)
    assert solution.objective == pytest.approx(all_costs(problem).min(), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_dual_ascent_equals_brute_force(all_costs, random_problem, seed):
    problem = random_problem(seed)
    solution = solve(problem, steps=NO_TABLES)
    assert solution.objective == pytest.approx(all_costs(problem).min(), rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_branching_equals_brute_force(all_costs, random_problem, seed):
    problem = random_problem(seed)
    solution = solve(problem, steps=TO_BRANCHES, tuning=Tuning(sweeps=1))
    assert solution.objective == pytest.approx(all_costs(problem).min(), rel=1e-9)
    assert solution.status == "optimal"


@pytest.mark.parametrize("seed", range(8))
def test_without_branches_dual_ascent_has_the_last_word(num_calls, all_costs, random_problem, seed):
    problem = random_problem(seed)
    found: list[Solution] = []

    def search(branch_gap: float) -> None:
        steps, tuning = TO_BRANCHES, Tuning(sweeps=1)
        found.append(solve(problem, branch_gap=branch_gap, steps=steps, tuning=tuning))

    assert num_calls(lambda: search(0.0), of=branch)
    assert not num_calls(lambda: search(inf), of=branch)
    solution = found[-1]
    best = all_costs(problem).min()
    assert solution.bound <= best * (1 + 1e-9) <= solution.objective * (1 + 2e-9)
    assert (solution.status == "optimal") == (solution.gap <= 1e-9)


def test_a_bound_that_is_enough_ends_the_search(num_calls, all_costs, random_problem):
    problem = random_problem(3)
    best = all_costs(problem).min()
    one_sweep = Tuning(sweeps=1)
    enough = solve(problem, branch_gap=inf, steps=NO_TABLES, tuning=one_sweep).bound
    found: list[Solution] = []

    def search() -> None:
        found.append(solve(problem, enough=0.5 * enough, steps=NO_TABLES))

    assert not num_calls(search, of=branch)
    assert 0.5 * enough <= found[0].bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("gap", [0.01, 0.2, 0.8])
@pytest.mark.parametrize("seed", range(8))
def test_a_wide_gap_proves_no_false_bound(all_costs, random_problem, seed, gap):
    problem = random_problem(seed)
    best = all_costs(problem).min()
    solution = solve(problem, relative_gap=gap, branch_gap=gap, steps=NO_TABLES)
    assert solution.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= solution.objective <= best / (1 - gap) * (1 + 1e-9)


def blocks(count: int, strategies: int, seed: int) -> Problem:
    """A chain of identical blocks of ten nodes, three edges from one to the next."""
    rng = np.random.default_rng(seed)

    def matrix() -> np.ndarray:
        return rng.random((strategies, strategies)) * 1e-3

    size = 10
    nodes = [rng.random(strategies) * 1e-3 for _ in range(size)]
    inside = [
        (i, j, matrix()) for i in range(size) for j in range(i + 1, size) if rng.random() < 0.3
    ]
    between = [(size - 1 - k, k, matrix()) for k in range(3)]
    edges = [
        Edge(size * block + i, size * block + j, costs)
        for block in range(count)
        for i, j, costs in inside
    ]
    edges += [
        Edge(size * (block - 1) + i, size * block + j, costs)
        for block in range(1, count)
        for i, j, costs in between
    ]
    return Problem(node_costs=tuple(nodes * count), edges=tuple(edges))


def test_chain_of_48_blocks():
    problem = blocks(48, 8, seed=0)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.variables == problem.num_variables
    assert len(solution.choice) == 480
    assert problem.cost(solution.choice) == solution.objective
    assert solve(problem).choice == solution.choice


def test_time_limit_gives_a_choice_with_its_bound():
    problem = blocks(12, 8, seed=0)
    solution = solve(problem, time_limit=0.0, steps=NO_TABLES)
    assert solution.status == "time_limit"
    assert solution.bound < solution.objective
    assert 0 < solution.gap < 1
    assert solution.bound <= solve(problem, time_limit=3.0, steps=NO_TABLES).objective


def test_the_result_is_never_worse_than_what_is_known(all_costs, random_problem):
    problem = random_problem(3)
    costs = all_costs(problem)
    best = np.unravel_index(np.argmin(costs), costs.shape)
    assert solve(problem, known=(0,) * len(best)).objective == pytest.approx(costs.min())

    # Without these steps and without time, the search finds no choice of its own.
    in_no_time = partial(solve, problem, time_limit=0.0, steps=())
    solution = in_no_time(known=[int(i) for i in best])
    assert solution.objective == pytest.approx(costs.min())
    assert solution.bound <= costs.min()
    assert solution.status == "time_limit"
    with pytest.raises(TimeoutError):
        in_no_time()


def test_infeasible_names_the_node():
    problem = Problem(node_costs=(np.zeros(2), np.full(2, inf)), edges=())
    with pytest.raises(InfeasibleError, match="node 1 has no strategy of finite cost"):
        solve(problem)


def test_infeasible_names_the_ends():
    edge = Edge(1, 2, np.full((2, 2), inf))
    problem = Problem(node_costs=(np.zeros(2),) * 3, edges=(edge,))
    with pytest.raises(InfeasibleError, match="nodes 1, 2 have no strategies"):
        solve(problem)


def test_infeasible_core_names_its_nodes():
    """Four nodes with three strategies and no structure: nothing for presolve to find."""
    different = np.where(np.eye(3) == 1, inf, 0.0)
    edges = tuple(Edge(u, v, different) for u in range(1, 5) for v in range(u + 1, 5))
    problem = Problem(node_costs=(np.zeros(3),) * 5, edges=edges)
    with pytest.raises(InfeasibleError) as error:
        solve(problem)
    assert set(error.value.nodes) <= {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([np.zeros((2, 2))], [], r"node 0 needs a vector"),
        ([np.zeros(0)], [], r"node 0 needs a vector"),
        ([np.array([np.nan])], [], r"node 0 has a cost that is NaN"),
        ([np.zeros(2)], [Edge(0, 1, np.zeros((2, 2)))], r"edge 0 \(0 -> 1\) has an end"),
        ([np.zeros(2)], [Edge(0, 0, np.zeros((2, 2)))], r"is a loop"),
        ([np.zeros(2), np.zeros(3)], [Edge(0, 1, np.zeros((3, 2)))], r"shape \(3, 2\)"),
        ([np.zeros(1), np.zeros(1)], [Edge(0, 1, np.array([[-inf]]))], r"NaN or -inf"),
        ([np.zeros(1), np.zeros(2)], [Edge(0, 1, np.array([[inf, np.nan]]))], r"NaN or -inf"),
    ],
)
def test_check(nodes, edges, message):
    with pytest.raises(ValueError, match=message):
        solve(Problem(node_costs=tuple(nodes), edges=tuple(edges)))


def test_verify_rejects_what_is_wrong():
    problem = Problem(
        node_costs=(np.array([1.0, inf]), np.array([1.0, 2.0])),
        edges=(Edge(0, 1, np.zeros((2, 2))),),
    )
    good = Solution(
        choice=(0, 0),
        objective=2.0,
        bound=2.0,
        seconds=0.0,
        variables=8,
    )
    verify(problem, good)
    assert good.status == "optimal"
    assert replace(good, bound=2.0 * (1 - 9e-7)).status == "optimal"
    assert replace(good, bound=1.9).status == "time_limit"
    assert replace(good, bound=1.9, wanted_gap=0.051).status == "within_gap"
    for wrong, message in [
        (replace(good, choice=(0,)), "1 choices for 2 nodes"),
        (replace(good, choice=(0, 2)), "node 1 has 2 strategies"),
        (replace(good, choice=(1, 0)), "forbidden"),
        (replace(good, choice=(0, 0.5)), r"strategies are whole numbers: \(0, 0.5\)"),
        (replace(good, choice=(0, 1)), "costs 3.0 s, not 2.0 s"),
        (replace(good, objective=nan), "costs 2.0 s, not nan s"),
        (replace(good, objective=inf), "costs 2.0 s, not inf s"),
        (replace(good, bound=2.5), "above objective"),
        (replace(good, bound=nan), "bound nan s is not finite"),
        (replace(good, bound=-inf), "bound -inf s is not finite"),
    ]:
        with pytest.raises(VerificationError, match=message):
            verify(problem, wrong)
