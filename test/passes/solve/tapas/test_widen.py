from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem
from alpa.passes.solve.tapas import tree
from alpa.passes.solve.tapas.tree import Limits, explore
from alpa.passes.solve.tapas.widen import NotProvenError, prove


@given(seed=st.integers(0, 1000), width=st.integers(1, 3), ranked=st.integers(1, 8))
def test_the_proven_list_is_that_of_brute_force(
    random_problem: Callable[..., Problem],
    all_costs: Callable[[Problem], np.ndarray],
    seed: int,
    width: int,
    ranked: int,
) -> None:
    problem = random_problem(seed, nodes=7, strategies=3)
    found = prove(problem, decisions=range(7), limits=Limits(ranked=ranked, width=width))
    best = np.sort(all_costs(problem), axis=None)[: len(found.costs)]
    assert [problem.cost(choice) for choice in found.choices] == pytest.approx(best.tolist())
    assert len(set(found.choices)) == len(found.choices)
    assert found.is_proven


@given(seed=st.integers(0, 1000), decision=st.integers(0, 5))
def test_the_proven_list_has_the_best_strategies_of_a_decision(
    random_problem: Callable[..., Problem],
    all_costs: Callable[[Problem], np.ndarray],
    seed: int,
    decision: int,
) -> None:
    problem = random_problem(seed, nodes=6, strategies=4)
    found = prove(problem, decisions=[decision], limits=Limits(ranked=2, width=1))
    best = all_costs(problem).min(axis=tuple(node for node in range(6) if node != decision))
    taken = [choice[decision] for choice in found.choices]
    assert taken == np.argsort(best)[: len(taken)].tolist()


def with_forbidden(seed: int) -> Problem:
    """Six nodes, all of them neighbours; a fifth of the pairs of patterns are incompatible."""
    rng = np.random.default_rng(seed)
    ends = [(u, v) for u in range(6) for v in range(u + 1, 6)]
    nodes = tuple(rng.random(3) for _ in range(6))
    pairs = [np.where(rng.random((3, 3)) < 0.2, np.inf, 0.0) for _ in ends]
    edges = tuple(Edge(u, v, costs) for (u, v), costs in zip(ends, pairs, strict=True))
    return Problem(node_costs=nodes, edges=edges)


@given(seed=st.integers(0, 1000))
def test_a_width_of_incompatible_branches_is_widened(
    all_costs: Callable[[Problem], np.ndarray], seed: int
) -> None:
    problem = with_forbidden(seed)
    least = all_costs(problem).min()
    limits = Limits(ranked=1, width=1)
    if least == np.inf:
        with pytest.raises(InfeasibleError):
            prove(problem, decisions=range(6), limits=limits)
        return
    assert prove(problem, decisions=range(6), limits=limits).costs == pytest.approx((least,))


def test_some_widths_are_too_small() -> None:
    with pytest.raises(SolverFailedError, match="no branch is left"):
        explore(with_forbidden(1), decisions=range(6), limits=Limits(ranked=1, width=1))
    assert prove(with_forbidden(1), decisions=range(6), limits=Limits(ranked=1, width=1)).width > 1


def test_the_branches_of_all_trees_are_counted(random_problem: Callable[..., Problem]) -> None:
    problem = random_problem(1, nodes=7, strategies=3)
    first = explore(problem, decisions=range(7), limits=Limits(ranked=3, width=1))
    assert not first.is_proven
    found = prove(problem, decisions=range(7), limits=Limits(ranked=3, width=1))
    counts, last = first.counts, first
    for width in (10, 100):
        assert not last.is_proven
        limits = Limits(ranked=3, width=width, most=last.worst)
        last = explore(problem, decisions=range(7), limits=limits)
        counts += last.counts
    assert (found.width, found.costs) == (100, last.costs)
    assert found.counts == counts
    assert counts.candidates > last.counts.candidates > 0


def test_a_search_that_ends_unproven_says_how_far_it_came(
    random_problem: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(1, nodes=7, strategies=3)
    first = explore(problem, decisions=range(7), limits=Limits(ranked=3, width=1))
    monkeypatch.setattr(tree, "MOST_BRANCHES", 9)
    with pytest.raises(NotProvenError) as raised:
        prove(problem, decisions=range(7), limits=Limits(ranked=3, width=1))
    assert "at most 9 are explored; with a width of 1 it found 3 strategies of" in str(raised.value)
    assert f"to {first.worst:.6g} s, but others may cost {first.beyond:.6g} s" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_the_deadline_ends_the_search(random_problem: Callable[..., Problem]) -> None:
    limits = Limits(ranked=1, width=1, deadline=0.0)
    with pytest.raises(NotProvenError, match=r"time ended at node 0 of 7; it found no strategy"):
        prove(random_problem(0), decisions=[], limits=limits)
