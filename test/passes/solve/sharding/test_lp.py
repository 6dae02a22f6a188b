from __future__ import annotations

from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.bound import dual_bound
from alpa.passes.solve.sharding.ilp import Edge, InfeasibleError, Problem
from alpa.passes.solve.sharding.lp import branch, relax

FRUSTRATED = Problem(
    # An odd cycle of nodes that want to differ: the relaxation takes halves and costs nothing.
    node_costs=(np.zeros(2),) * 3,
    edges=tuple(Edge(u, v, np.eye(2) * 1e-3) for u, v in ((0, 1), (1, 2), (0, 2))),
)


@pytest.mark.parametrize("seed", range(5))
def test_duals_prove_the_bound(all_costs, random_problem, seed):
    problem = random_problem(seed, nodes=6)
    relaxed = relax(problem, deadline=inf)
    assert relaxed is not None
    assert all_costs(relaxed.shifted) == pytest.approx(all_costs(problem), rel=1e-9)
    value = sum(float(c @ x) for c, x in zip(problem.node_costs, relaxed.weights, strict=True))
    bound = dual_bound(relaxed.shifted)
    assert value < bound <= all_costs(problem).min() * (1 + 1e-9)


def test_branching_closes_what_the_relaxation_leaves():
    relaxed = relax(FRUSTRATED, deadline=inf)
    assert relaxed is not None
    assert dual_bound(relaxed.shifted) == pytest.approx(0.0, abs=1e-12)
    whole = branch(FRUSTRATED, deadline=inf, relative_gap=1e-9)
    assert whole is not None
    assert FRUSTRATED.cost([int(x.argmax()) for x in whole.weights]) == 1e-3
    assert whole.bound == pytest.approx(1e-3)


def test_forbidden_pairs_are_no_variables():
    edge = Edge(0, 1, np.array([[inf, 1.0], [3.0, inf]]))
    problem = Problem(node_costs=(np.zeros(2), np.zeros(2)), edges=(edge,))
    relaxed = relax(problem, deadline=inf)
    assert relaxed is not None
    assert [x.argmax() for x in relaxed.weights] == [0, 1]


def test_infeasible():
    problem = Problem(node_costs=(np.zeros(1), np.zeros(1)), edges=(Edge(0, 1, np.array([[inf]])),))
    with pytest.raises(InfeasibleError):
        relax(problem, deadline=inf)


def test_deadline():
    assert relax(FRUSTRATED, deadline=0.0) is None
    assert branch(FRUSTRATED, deadline=0.0, relative_gap=1e-9) is None
