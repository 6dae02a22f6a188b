from __future__ import annotations

from dataclasses import replace
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.sharding.pareto import solve
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem, Usage

PRICES = (0.0, 0.5, 3.0)
"""of the fastest choice, and others"""


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Some nodes hold bytes, all at one time; some strategies and pairs are forbidden."""
    cost = st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0, inf])
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    nodes = tuple(np.array(draw(st.lists(cost, min_size=n, max_size=n))) for n in sizes)
    pairs = [(u, v) for u in range(len(sizes)) for v in range(u)]
    edges: list[Edge] = []
    for u, v in draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []:
        count = sizes[u] * sizes[v]
        matrix = draw(st.lists(cost, min_size=count, max_size=count))
        edges.append(Edge(u, v, np.array(matrix).reshape(sizes[u], sizes[v])))
    held = {
        v: np.array(draw(st.lists(st.integers(0, 8), min_size=n, max_size=n)), dtype=float)
        for v, n in enumerate(sizes)
        if draw(st.booleans())
    }
    return Problem(
        node_costs=nodes,
        edges=tuple(edges),
        usages=tuple(Usage(nodes=(v,), bytes=h, start=0, stop=1) for v, h in held.items()),
        memory_limit=8.0,
    )


def bytes_of_all(problem: Problem) -> np.ndarray:
    shape = tuple(costs.size for costs in problem.node_costs)
    total = np.zeros(shape)
    for usage in problem.usages:
        dims = [n if v in usage.nodes else 1 for v, n in enumerate(shape)]
        total = total + usage.bytes.reshape(dims)
    return total


@st.composite
def dense_problems(draw: st.DrawFn) -> Problem:
    """All nodes are neighbours, so none is minimised out; some pairs are forbidden."""
    cost = st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0, inf, inf])
    sizes = draw(st.lists(st.integers(1, 3), min_size=4, max_size=5))
    edges: list[Edge] = []
    for u in range(len(sizes)):
        for v in range(u):
            count = sizes[u] * sizes[v]
            matrix = draw(st.lists(cost, min_size=count, max_size=count))
            edges.append(Edge(u, v, np.array(matrix).reshape(sizes[u], sizes[v])))
    held = [np.arange(n, dtype=float) for n in sizes]
    return Problem(
        node_costs=tuple(np.ones(n) for n in sizes),
        edges=tuple(edges),
        usages=tuple(Usage(nodes=(v,), bytes=h, start=0, stop=1) for v, h in enumerate(held)),
        memory_limit=8.0,
    )


@settings(max_examples=300, deadline=None)
@given(problem=problems() | dense_problems())
def test_each_choice_is_the_best_at_its_price(all_costs, problem):
    costs, held = all_costs(problem), bytes_of_all(problem)
    if costs.min() == inf:
        with pytest.raises(InfeasibleError):
            solve(problem, PRICES[1:], gap=1e-9, time_limit=60.0)
        return
    choices = solve(problem, PRICES[1:], gap=1e-9, time_limit=60.0)
    for price, choice in zip(PRICES, choices, strict=True):
        paid = costs + price * costs.min() * held / problem.memory_limit
        assert paid[choice] == pytest.approx(paid.min(), rel=1e-6, abs=1e-9)


def test_dense_problems_within_the_gap(all_costs, random_problem):
    for seed in range(8):
        problem = random_problem(seed)
        rng = np.random.default_rng(seed)
        sizes = [costs.size for costs in problem.node_costs]
        problem = replace(
            problem,
            usages=tuple(
                Usage(nodes=(v,), bytes=rng.random(n), start=0, stop=1) for v, n in enumerate(sizes)
            ),
            memory_limit=3.0,
        )
        costs, held = all_costs(problem), bytes_of_all(problem)
        assert costs.size == prod(sizes)
        bytes_held: list[float] = []
        for price, choice in zip(
            PRICES, solve(problem, PRICES[1:], gap=0.01, time_limit=60.0), strict=True
        ):
            # The unit of prices is itself known to a hundredth.
            unit = costs.min() * (1.01 if price else 1.0)
            paid = costs + price * unit * held / problem.memory_limit
            assert paid[choice] <= paid.min() * 1.03
            bytes_held.append(held[choice])
        assert bytes_held[0] >= bytes_held[-1]
