from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from alpa.passes.solve.sharding.flat import Flat, least_places, spread
from alpa.passes.solve.sharding.forest import Forest
from alpa.passes.solve.sharding.ilp import Edge, Problem


def test_spread_and_least_places():
    assert spread(np.array([7, 0, 3]), np.array([2, 0, 3])).tolist() == [7, 8, 3, 4, 5]
    values = np.array([3.0, 1.0, 1.0, 5.0, 2.0])
    assert least_places(values, np.array([3, 2])).tolist() == [1, 1]


def sparse_problem(seed: int, nodes: int = 9) -> Problem:
    """A tree with a few more edges; some pairs are forbidden."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, size=nodes)
    ends = [(int(rng.integers(k)), k) for k in range(1, nodes)]
    ends += [(0, nodes - 1), (1, nodes - 2)]
    edges = []
    for u, v in ends:
        costs = rng.random((sizes[u], sizes[v]))
        costs[1:, 1:][rng.random(costs[1:, 1:].shape) < 0.3] = np.inf
        edges.append(Edge(u, v, costs))
    return Problem(node_costs=tuple(rng.random(size) for size in sizes), edges=tuple(edges))


@pytest.mark.parametrize("seed", range(8))
def test_a_forest_is_the_best_where_the_others_stay(seed):
    problem = sparse_problem(seed)
    flat, rng = Flat(problem), np.random.default_rng(seed)
    start = np.zeros(9, dtype=np.int64)
    forest = Forest(flat, rng.permutation(9))
    found = forest.solve(flat.costs, flat.entries, start)
    fixed = np.setdiff1d(np.arange(9), forest.nodes)
    assert (found[fixed] == start[fixed]).all()
    best = min(
        problem.cost(choice)
        for choice in product(
            *(
                range(costs.size) if node in forest.nodes else (0,)
                for node, costs in enumerate(problem.node_costs)
            )
        )
    )
    assert flat.cost(found) == pytest.approx(problem.cost(found.tolist())) == pytest.approx(best)


def test_the_whole_of_a_tree_with_its_leaves_apart():
    rng = np.random.default_rng(3)
    edges = tuple(Edge((k - 1) // 2, k, rng.random((3, 3))) for k in range(1, 7))
    problem = Problem(node_costs=tuple(rng.random(3) for _ in range(7)), edges=edges)
    flat = Flat(problem)
    forest = Forest(flat, np.arange(3), np.arange(3, 7))
    assert forest.nodes.tolist() == list(range(7))
    found = forest.solve(flat.costs, flat.entries, np.zeros(7, dtype=np.int64))
    best = min(problem.cost(choice) for choice in product(range(3), repeat=7))
    assert flat.cost(found) == pytest.approx(best)


def test_no_node_joins_two_neighbours_of_one_tree():
    """Three nodes in a ring, and one that is alone."""
    ring = tuple(Edge(u, v, np.zeros((2, 2))) for u, v in [(0, 1), (1, 2), (2, 0)])
    flat = Flat(Problem(node_costs=(np.zeros(2),) * 4, edges=ring))
    assert Forest(flat, np.array([2, 0, 3, 1])).nodes.tolist() == [0, 2, 3]


def test_parallel_edges_are_a_cycle():
    edges = (Edge(0, 1, np.eye(2)), Edge(1, 0, 1 - np.eye(2)))
    flat = Flat(Problem(node_costs=(np.zeros(2), np.array([1.0, 0.0])), edges=edges))
    forest = Forest(flat, np.array([0, 1]))
    assert forest.nodes.tolist() == [0]
    assert forest.solve(flat.costs, flat.entries, np.array([1, 1])).tolist() == [0, 1]
