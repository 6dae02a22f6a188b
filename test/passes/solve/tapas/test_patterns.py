from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem, Usage
from alpa.passes.solve.tapas.patterns import compatible


def test_patterns_without_a_compatible_neighbour_are_dropped() -> None:
    # Figure 4 of the paper: A0 -> B0 and A1 -> B0 are valid, A0 -> B1 and A1 -> B1 are not.
    pairs = np.array([[1.0, inf], [2.0, inf]])
    onward = np.array([[inf, 1.0], [1.0, inf]])
    problem = Problem(
        node_costs=(np.zeros(2), np.zeros(2), np.zeros(2)),
        edges=(Edge(0, 1, pairs), Edge(1, 2, onward)),
        usages=(Usage(nodes=(2,), bytes=np.array([5.0, 7.0]), start=0, stop=1),),
    )
    found = compatible(problem)
    assert [kept.tolist() for kept in found.kept] == [[0, 1], [0], [1]]
    assert found.problem.usages[0].bytes.tolist() == [7.0]
    assert found.chosen((1, 0, 0)) == (1, 0, 1)


def test_a_node_without_patterns_is_named() -> None:
    problem = Problem(
        node_costs=(np.zeros(2), np.array([0.0, inf])),
        edges=(Edge(0, 1, np.array([[inf, 0.0], [inf, 0.0]])),),
    )
    with pytest.raises(InfeasibleError, match="has no strategy of finite cost"):
        compatible(problem)


@given(seed=st.integers(0, 1000))
def test_no_valid_strategy_is_lost(
    random_problem: Callable[..., Problem], all_costs: Callable[[Problem], np.ndarray], seed: int
) -> None:
    problem = random_problem(seed, nodes=5, strategies=3)
    rng = np.random.default_rng(seed)
    edges = tuple(
        Edge(e.source, e.target, np.where(rng.random(e.costs.shape) < 0.4, inf, e.costs))
        for e in problem.edges
    )
    problem = Problem(node_costs=problem.node_costs, edges=edges)
    costs = all_costs(problem)
    try:
        found = compatible(problem)
    except InfeasibleError:
        assert not (costs < inf).any()
        return
    fewer = all_costs(found.problem)
    assert (fewer < inf).sum() == (costs < inf).sum()
    assert fewer.min() == pytest.approx(costs.min()) or not (costs < inf).any()
