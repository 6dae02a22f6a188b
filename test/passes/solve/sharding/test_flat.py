from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alpa.passes.solve.sharding.bound import approach
from alpa.passes.solve.sharding.flat import Flat
from alpa.passes.solve.sharding.messages import Messages
from alpa.passes.solve.sharding.problem import Edge


def test_the_same_nodes_and_edges_at_other_costs(random_problem):
    problem = random_problem(2)
    first, *others = problem.edges
    dearer = Edge(first.source, first.target, first.costs + 1.0)
    costs = tuple(costs + 2.0 for costs in problem.node_costs)
    other = replace(problem, node_costs=costs, edges=(dearer, *others))
    flat = Flat(problem)
    begun, fresh = flat.at(other), Flat(other)
    assert begun.costs.tolist() == fresh.costs.tolist()
    assert begun.entries.tolist() == fresh.entries.tolist()
    assert flat.entries.tolist() == Flat(problem).entries.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_messages_go_on_at_other_costs(all_costs, random_problem, seed):
    problem = random_problem(seed)
    begin = approach(problem, near=0.0, enough=np.inf, deadline=np.inf).messages
    core = begin.problem()
    other = replace(core, node_costs=tuple(costs + 1.0 for costs in core.node_costs))
    assert Messages(other, begin).bound()[0] <= all_costs(other).min() * (1 + 1e-9)
