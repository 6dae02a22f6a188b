from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.bound import Messages
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem
from alpa.passes.solve.tapas import tree
from alpa.passes.solve.tapas.tree import Limits, TooManyBranchesError, explore, levels

ALL = 10**6
"""A width that no level of these problems reaches."""


def with_forbidden(problem: Problem, seed: int, share: float) -> Problem:
    rng = np.random.default_rng(seed)
    edges = tuple(
        Edge(e.source, e.target, np.where(rng.random(e.costs.shape) < share, inf, e.costs))
        for e in problem.edges
    )
    return replace(problem, edges=edges)


@given(seed=st.integers(0, 1000), shifted=st.booleans())
def test_the_list_of_all_branches_is_that_of_brute_force(
    random_problem: Callable[..., Problem],
    all_costs: Callable[[Problem], np.ndarray],
    seed: int,
    shifted: bool,
) -> None:
    problem = with_forbidden(random_problem(seed, nodes=5, strategies=3), seed, 0.2)
    costs = all_costs(problem)
    searched = problem
    if shifted and (costs < inf).any():
        searched = random_problem(seed, nodes=5, strategies=3)
        costs = all_costs(searched)
        problem = searched
        messages = Messages(searched)
        for _ in range(3):
            messages.sweep(forward=True)
            messages.sweep(forward=False)
        searched = messages.problem()
    limits = Limits(ranked=8, width=ALL)
    if not (costs < inf).any():
        with pytest.raises(InfeasibleError):
            explore(searched, decisions=range(5), limits=limits)
        return
    found = explore(searched, decisions=range(5), limits=limits)
    best = np.sort(costs[costs < inf], axis=None)[:8]
    assert [problem.cost(c) for c in found.choices] == pytest.approx(best.tolist())
    assert found.costs == pytest.approx(best.tolist())
    assert len(set(found.choices)) == len(found.choices)
    assert (found.beyond, found.width, found.is_proven) == (inf, ALL, True)


@given(seed=st.integers(0, 1000), decision=st.integers(0, 5))
def test_the_list_has_the_best_strategy_of_each_decision(
    random_problem: Callable[..., Problem],
    all_costs: Callable[[Problem], np.ndarray],
    seed: int,
    decision: int,
) -> None:
    problem = random_problem(seed, nodes=6, strategies=3)
    costs = all_costs(problem)
    found = explore(problem, decisions=[decision], limits=Limits(ranked=5, width=ALL))
    others = tuple(node for node in range(6) if node != decision)
    best = costs.min(axis=others)
    assert [choice[decision] for choice in found.choices] == np.argsort(best).tolist()
    expected = np.sort(best).tolist()
    assert [problem.cost(choice) for choice in found.choices] == pytest.approx(expected)


@given(seed=st.integers(0, 1000), width=st.integers(1, 6))
def test_a_width_gives_a_valid_strategy_and_bound(
    random_problem: Callable[..., Problem],
    all_costs: Callable[[Problem], np.ndarray],
    seed: int,
    width: int,
) -> None:
    problem = random_problem(seed, nodes=7, strategies=3)
    found = explore(problem, decisions=range(7), limits=Limits(ranked=3, width=width))
    optimum = all_costs(problem).min()
    costs = [problem.cost(choice) for choice in found.choices]
    assert costs == sorted(costs)
    assert costs[0] >= optimum * (1 - 1e-12)
    assert min(found.beyond, costs[0]) <= optimum * (1 + 1e-12)
    if found.is_proven:
        best = np.sort(all_costs(problem), axis=None)[: len(costs)]
        assert costs == pytest.approx(best.tolist())


def test_a_width_that_leaves_no_valid_strategy_is_an_error() -> None:
    # The cheap pattern of node 0 leads on to node 1, and only the expensive one to node 2.
    first, second = np.array([[0.0, inf], [inf, 0.0]]), np.array([[inf, inf], [5.0, 5.0]])
    nodes = (np.array([0.0, 9.0]), np.zeros(2), np.zeros(2))
    problem = Problem(node_costs=nodes, edges=(Edge(0, 1, first), Edge(1, 2, second)))
    found = explore(problem, decisions=[0], limits=Limits(ranked=1, width=1))
    assert found.choices == ((1, 1, 0),)  # The lower bound looks ahead along a chain.
    rng = np.random.default_rng(0)
    ends = [(u, v) for u in range(5) for v in range(u + 1, 5)]
    # Neighbours differ: five nodes need five patterns.
    differ = np.where(np.eye(5, dtype=bool), inf, 0.0)
    edges = tuple(Edge(u, v, differ) for u, v in ends)
    costs = tuple(rng.random(5) for _ in range(5))
    assert explore(
        Problem(node_costs=costs, edges=edges), decisions=[], limits=Limits(ranked=1, width=ALL)
    ).choices
    differ = np.where(np.eye(4, dtype=bool), inf, 0.0)
    edges = tuple(Edge(u, v, differ) for u, v in ends)
    problem = Problem(node_costs=tuple(rng.random(4) for _ in range(5)), edges=edges)
    with pytest.raises(InfeasibleError):
        explore(problem, decisions=[], limits=Limits(ranked=1, width=ALL))
    with pytest.raises(SolverFailedError, match="no branch is left at node 4 of 5"):
        explore(problem, decisions=[], limits=Limits(ranked=1, width=2))


def test_branches_are_counted() -> None:
    # Two nodes whose patterns must be the same: half of the pairs are incompatible.
    same = np.where(np.eye(2, dtype=bool), 0.0, inf)
    problem = Problem(node_costs=(np.zeros(2), np.array([1.0, 2.0])), edges=(Edge(0, 1, same),))
    found = explore(problem, decisions=[0], limits=Limits(ranked=10, width=ALL))
    counts = found.counts
    assert found.choices == ((0, 0), (1, 1))
    assert (counts.candidates, counts.incompatible, counts.valid) == (6, 2, 4)
    assert (counts.equal, counts.worse, counts.pruned) == (0, 0, 2)
    # A decision that costs more than is allowed is not explored.
    found = explore(problem, decisions=[0], limits=Limits(ranked=10, width=ALL, most=1.5))
    assert found.choices == ((0, 0),)
    assert (found.counts.worse, found.counts.candidates) == (1, 4)


def test_too_many_branches_are_refused(
    random_problem: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "MOST_BRANCHES", 20)
    with pytest.raises(TooManyBranchesError, match="at most 20 are explored"):
        explore(random_problem(0), decisions=range(7), limits=Limits(ranked=9, width=ALL))
    explore(random_problem(0), decisions=[], limits=Limits(ranked=1, width=5))


def test_levels_of_a_chain_leave_one_end_open() -> None:
    rng = np.random.default_rng(0)
    order = [3, 0, 4, 1, 5, 2]
    edges = tuple(Edge(u, v, rng.random((2, 2))) for u, v in pairwise(order))
    found = levels(Problem(node_costs=(np.zeros(2),) * 6, edges=edges))
    assert sorted(found) == list(range(6))
    place = [order.index(node) for node in found]
    assert max(place[:4]) - min(place[:4]) == 3  # Each level is beside those before.


def test_the_deadline_ends_the_search(random_problem: Callable[..., Problem]) -> None:
    limits = Limits(ranked=1, width=ALL, deadline=0.0)
    with pytest.raises(TimeoutError, match="time ended at node 0 of 7"):
        explore(random_problem(0), decisions=[], limits=limits)
