from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.sharding.fuse import fuse, made_of
from alpa.passes.solve.sharding.problem import Usage
from alpa.passes.solve.sharding.settings import Settings, Tuning


@settings(max_examples=60)
@given(seed=st.integers(0, 1000), count=st.integers(1, 4))
def test_it_is_the_best_of_all_mixtures(all_costs, random_problem, seed, count):
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    sizes = [costs.size for costs in problem.node_costs]
    choices = [tuple(int(i) for i in rng.integers(0, sizes)) for _ in range(count)]
    fused = fuse(problem, choices)
    mixtures = np.full(sizes, inf)
    mixed = np.ix_(*(np.unique(strategies) for strategies in zip(*choices, strict=True)))
    mixtures[mixed] = all_costs(problem)[mixed]
    assert problem.cost(fused) == pytest.approx(mixtures.min(), rel=1e-12)


def test_where_tables_are_too_large_it_is_the_best_choice(random_problem):
    small = Settings(tuning=Tuning(fused_entries=1))
    problem = random_problem(3, nodes=12)
    rng = np.random.default_rng(0)
    choices = [tuple(int(i) for i in rng.integers(0, 4, 12)) for _ in range(4)]
    assert fuse(problem, choices, settings=small) == min(choices, key=problem.cost)


def test_usages_of_what_is_left_are_those_of_the_strategies_taken(random_problem):
    problem = random_problem(0)
    edge = problem.edges[0]
    nodes = (edge.target, edge.source)
    held = np.arange(16.0).reshape(4, 4)
    usage = Usage(nodes=nodes, bytes=held, start=0, stop=1)
    choices = [(0,) * 7, (2,) * 7]
    few, taken = made_of(replace(problem, usages=(usage,)), choices)
    assert [list(k) for k in taken] == [[0, 2]] * 7
    assert (few.usages[0].bytes == [[0.0, 2.0], [8.0, 10.0]]).all()
