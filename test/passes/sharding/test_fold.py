from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.sharding.fold import RADIUS, fold, unfold
from alpa.passes.solve.sharding.ilp import Edge, Problem, solve


def layered(seed: int, depth: int, *, width: int = 3, strategies: int = 3) -> Problem:
    """`depth` equal layers of `width` nodes between two different ends."""
    rng = np.random.default_rng(seed)
    inner = [rng.random(strategies) for _ in range(width)]
    within = {
        (u, v): rng.random((strategies, strategies))
        for u in range(width)
        for v in range(u + 1, width)
    }
    between = rng.random((strategies, strategies))
    first, last = rng.random(strategies), rng.random(strategies)
    nodes = [first, *(inner[k] for _ in range(depth) for k in range(width)), last]
    edges = [Edge(0, 1, between)]
    for layer in range(depth):
        start = 1 + layer * width
        edges += [Edge(start + u, start + v, costs) for (u, v), costs in within.items()]
        edges.append(Edge(start + width - 1, start + width, between))
    return Problem(node_costs=tuple(nodes), edges=tuple(edges))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few kinds of nodes and matrices, so that many nodes look alike; some pairs forbidden."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = [rng.random(2) for _ in range(2)]
    tie = np.where(np.eye(2, dtype=bool), 0.0, inf)
    matrices = [rng.random((2, 2)), np.array([[0.0, 1.0], [1.0, 0.0]]), tie]
    count = draw(st.integers(1, 9))
    nodes = [kinds[draw(st.integers(0, 1))] for _ in range(count)]
    edges: list[Edge] = []
    for source in range(count):
        for target in range(source + 1, count):
            kind = draw(st.sampled_from([None, None, 0, 1, 2]))
            if kind is not None:
                edges.append(Edge(source, target, matrices[kind]))
    return Problem(node_costs=tuple(nodes), edges=tuple(edges))


def check_folded(problem: Problem, radius: int = RADIUS) -> float:
    """Compares the optimum of the folded problem with the whole one; returns its excess."""
    folded, node_class = fold(problem, radius)
    folded.check()
    assert len(node_class) == len(problem.node_costs)
    best = solve(folded)
    choice = unfold(best.choice, node_class)
    assert problem.cost(choice) == pytest.approx(best.objective, rel=1e-9)
    optimum = solve(problem).objective
    assert best.objective >= optimum * (1 - 1e-9)
    return best.objective - optimum


@settings(max_examples=100, deadline=None)
@given(problem=problems(), radius=st.integers(0, 5))
def test_the_folded_optimum_is_an_assignment_of_the_whole_problem(problem, radius):
    check_folded(problem, radius)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_every_folded_assignment_costs_the_same_in_the_whole_problem(problem, data):
    folded, node_class = fold(problem)
    choice = [data.draw(st.integers(0, costs.size - 1)) for costs in folded.node_costs]
    assert folded.cost(choice) == pytest.approx(problem.cost(unfold(choice, node_class)), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_equal_layers_fold_to_a_size_that_does_not_grow(seed):
    sizes = {
        (len(folded.node_costs), len(folded.edges))
        for folded, _ in (fold(layered(seed, depth)) for depth in (20, 40, 80))
    }
    assert len(sizes) == 1
    # The two ends, the layers within the radius of either, and one in between.
    assert sizes.pop()[0] <= 2 + 3 * (2 * RADIUS + 1)


@pytest.mark.parametrize("seed", range(5))
def test_equal_layers_cost_what_they_cost_unfolded(seed):
    problem = layered(seed, 12)
    assert check_folded(problem) <= 0.02 * solve(problem).objective


def test_nothing_is_tied_where_nothing_is_equal():
    rng = np.random.default_rng(0)
    problem = Problem(
        node_costs=tuple(rng.random(2) for _ in range(6)),
        edges=tuple(Edge(u, u + 1, rng.random((2, 2))) for u in range(5)),
    )
    folded, node_class = fold(problem)
    assert node_class == [0, 1, 2, 3, 4, 5]
    assert folded.cost([1, 0] * 3) == pytest.approx(problem.cost([1, 0] * 3))


def test_nodes_that_differ_only_in_a_neighbour_are_apart():
    plain, other = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    match = np.array([[0.0, 3.0], [3.0, 0.0]])
    # a - b - c and a - b - d: the two b's want different strategies.
    problem = Problem(
        node_costs=(plain, plain, 4 * plain, plain, plain, 4 * other),
        edges=tuple(Edge(u, u + 1, match) for u in (0, 1, 3, 4)),
    )
    _, node_class = fold(problem)
    assert node_class[1] != node_class[4]
    _, node_class = fold(problem, radius=0)
    assert node_class[1] == node_class[4]


def test_an_edge_inside_a_class_becomes_its_cost():
    costs, match = np.array([1.0, 2.0]), np.array([[5.0, 0.0], [0.0, 7.0]])
    folded, node_class = fold(Problem(node_costs=(costs, costs), edges=(Edge(0, 1, match),)), 0)
    assert node_class == [0, 0]
    assert folded.edges == ()
    np.testing.assert_allclose(folded.node_costs[0], [2 + 5, 4 + 7])


def test_rounding_does_not_keep_equal_nodes_apart():
    costs = np.array([1e-4, 3e-4])
    problem = Problem(node_costs=(costs, costs * (1 + 1e-12)), edges=())
    assert fold(problem)[1] == [0, 0]
