from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.solve.sharding.buckets import eliminate
from alpa.passes.solve.sharding.ilp import Edge, Problem


@pytest.mark.parametrize("seed", range(10))
def test_equals_brute_force(all_costs, random_problem, seed):
    problem = random_problem(seed)
    choice = eliminate(problem, max_entries=1e6)
    assert choice is not None
    assert problem.cost(choice) == pytest.approx(all_costs(problem).min())


def test_single_node():
    problem = Problem(node_costs=(np.array([2.0, 1.0]),), edges=())
    assert eliminate(problem, max_entries=10) == (1,)


def test_limit_counts_all_tables():
    edge = Edge(0, 1, np.zeros((3, 4)))
    problem = Problem(node_costs=(np.zeros(3), np.zeros(4)), edges=(edge,))
    assert eliminate(problem, max_entries=15) is None
    assert eliminate(problem, max_entries=16) == (0, 0)
