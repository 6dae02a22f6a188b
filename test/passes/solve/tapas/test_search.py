from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import Edge, Problem, Usage
from alpa.passes.solve.tapas.results import NoCandidateFitsError
from alpa.passes.solve.tapas.search import solve
from alpa.passes.solve.tapas.settings import Settings

EXHAUSTIVE = Settings(variant="exhaustive")


@given(seed=st.integers(0, 1000))
def test_the_exhaustive_variant_is_optimal(
    random_problem: Callable[..., Problem], all_costs: Callable[[Problem], np.ndarray], seed: int
) -> None:
    problem = random_problem(seed)
    found = solve(problem, settings=EXHAUSTIVE)
    assert found.solution.objective == pytest.approx(all_costs(problem).min())
    assert found.solution.status == "optimal"
    assert found.searched_nodes == len(problem.node_costs)
    assert found.mined is None


@given(seed=st.integers(0, 200), depth=st.integers(2, 3))
def test_the_pruned_variant_is_optimal_among_equal_layers(
    layered: Callable[..., Problem], seed: int, depth: int
) -> None:
    problem = layered(seed, depth)
    found = solve(problem, settings=Settings(min_size=8))
    assert found.searched_nodes == 10
    assert found.mined is not None
    assert found.mined.num_unique == 3
    layers = [found.solution.choice[1 + 8 * k : 9 + 8 * k] for k in range(depth)]
    assert len(set(layers)) == 1
    whole = solve(problem, settings=EXHAUSTIVE).solution.objective
    assert found.solution.objective >= whole * (1 - 1e-12)
    assert whole == pytest.approx(ilp.solve(problem).objective)


def holding(problem: Problem, limit: float) -> Problem:
    """Each node holds more bytes the higher the number of its strategy."""
    usages = [
        Usage(nodes=(v,), bytes=np.arange(costs.size, dtype=float), start=0, stop=1)
        for v, costs in enumerate(problem.node_costs)
    ]
    return replace(problem, usages=tuple(usages), memory_limit=limit)


@given(seed=st.integers(0, 200), limit=st.integers(0, 21))
def test_the_first_candidate_that_fits_is_taken(
    random_problem: Callable[..., Problem], seed: int, limit: int
) -> None:
    problem = holding(random_problem(seed), limit)
    settings = Settings(ranked=30)
    free = solve(replace(problem, memory_limit=21.0), settings=settings)
    least = min(one.peak_bytes for one in free.ranked)
    if least > limit:
        with pytest.raises(NoCandidateFitsError) as raised:
            solve(problem, settings=settings)
        assert raised.value.needed == least
        return
    found = solve(problem, settings=settings)
    taken = [one.choice for one in found.ranked].index(found.solution.choice)
    assert found.solution.peak_bytes <= limit
    assert all(one.peak_bytes > limit for one in found.ranked[:taken])
    assert [one.seconds for one in found.ranked] == sorted(one.seconds for one in found.ranked)


def test_the_error_says_how_many_were_ranked(random_problem: Callable[..., Problem]) -> None:
    problem = holding(random_problem(0), 1.0)
    with pytest.raises(NoCandidateFitsError, match=r"none of 2 ranked candidates fits") as raised:
        solve(problem, settings=Settings(ranked=2))
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_an_invalid_problem_is_refused() -> None:
    problem = Problem(node_costs=(np.zeros(2),), edges=(Edge(0, 0, np.zeros((2, 2))),))
    with pytest.raises(ValueError, match="is a loop"):
        solve(problem)
