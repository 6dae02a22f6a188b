from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from alpa import passes
from alpa.passes.solve.sharding.bound import dual_bound
from alpa.passes.solve.sharding.ilp import Edge, InfeasibleError, Problem, Usage
from alpa.passes.solve.sharding.mip import branch, new_highs, relax

FRUSTRATED = Problem(
    # An odd cycle of nodes that should differ: the relaxation takes halves and costs nothing.
    node_costs=(np.zeros(2),) * 3,
    edges=tuple(Edge(u, v, np.eye(2) * 1e-3) for u, v in ((0, 1), (1, 2), (0, 2))),
)


@pytest.mark.parametrize("seed", range(5))
def test_duals_of_the_relaxation_prove_a_bound(all_costs, random_problem, seed):
    problem = random_problem(seed, nodes=6)
    relaxed = relax(problem, deadline=inf)
    assert relaxed is not None
    assert all_costs(relaxed.shifted) == pytest.approx(all_costs(problem), rel=1e-9)
    assert dual_bound(problem) < dual_bound(relaxed.shifted)
    assert dual_bound(relaxed.shifted) <= all_costs(problem).min() * (1 + 1e-9)
    assert problem.cost(relaxed.choice) >= all_costs(problem).min() * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_equals_brute_force(all_costs, random_problem, seed):
    problem = random_problem(seed, nodes=6)
    best = all_costs(problem).min()
    found = branch(problem, deadline=inf, relative_gap=1e-9)
    assert found is not None
    assert problem.cost(found.choice) == pytest.approx(best)
    assert found.bound == pytest.approx(best)


def test_branching_closes_what_the_relaxation_leaves():
    relaxed = relax(FRUSTRATED, deadline=inf)
    assert relaxed is not None
    assert dual_bound(relaxed.shifted) == pytest.approx(0.0, abs=1e-12)
    whole = branch(FRUSTRATED, deadline=inf, relative_gap=1e-9)
    assert whole is not None
    assert FRUSTRATED.cost(whole.choice) == 1e-3
    assert whole.bound == pytest.approx(1e-3)


def test_the_limit_holds_at_the_times_that_are_given():
    """The cheap strategies are large: only one of the three nodes can take its own."""
    held = np.array([6.0, 1.0])
    problem = Problem(
        node_costs=tuple(np.array([0.0, k]) for k in (1.0, 2.0, 3.0)),
        edges=(),
        usages=tuple(Usage(nodes=(v,), bytes=held, start=4, stop=5) for v in range(3)),
        memory_limit=10.0,
    )
    found = branch(problem, deadline=inf, relative_gap=1e-9, times=[4])
    assert found is not None
    assert found.choice == (1, 1, 0)
    free = branch(problem, deadline=inf, relative_gap=1e-9)
    assert free is not None
    assert free.choice == (0, 0, 0)


def test_forbidden_pairs_are_no_variables():
    edge = Edge(0, 1, np.array([[inf, 1.0], [3.0, inf]]))
    problem = Problem(node_costs=(np.zeros(2), np.zeros(2)), edges=(edge,))
    found = branch(problem, deadline=inf, relative_gap=1e-9)
    assert found is not None
    assert found.choice == (0, 1)


def test_infeasible():
    problem = Problem(node_costs=(np.zeros(1), np.zeros(1)), edges=(Edge(0, 1, np.array([[inf]])),))
    with pytest.raises(InfeasibleError):
        branch(problem, deadline=inf, relative_gap=1e-9)


def test_deadline():
    assert relax(FRUSTRATED, deadline=0.0) is None
    assert branch(FRUSTRATED, deadline=0.0, relative_gap=1e-9) is None


def test_every_highs_has_one_thread():
    """With another number than the first of a process, HiGHS does not run."""
    assert new_highs().getOptionValue("threads")[1] == 1
    makers = [
        source.name
        for source in Path(passes.__path__[0]).rglob("*.py")
        if "highspy.Highs(" in source.read_text()
    ]
    assert makers == ["mip.py"]
