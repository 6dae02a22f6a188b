"""Each rule by itself, on a problem where it alone applies."""

from __future__ import annotations

from itertools import combinations, product
from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.ilp import Edge, InfeasibleError, Problem
from alpa.passes.solve.sharding.presolve import Reduction

A = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 4.0], [5.0, 1.0, 0.0]])
B = np.array([[1.0, 0.0, 2.0], [0.0, 4.0, 1.0], [3.0, 2.0, 0.0]])


def reduction(nodes, *edges) -> Reduction:
    return Reduction(Problem(node_costs=tuple(map(np.array, nodes)), edges=edges))


def zeros(count: int) -> list[list[float]]:
    return [[0.0] * 3] * count


def test_parallel_edges_are_added_up():
    r = reduction(zeros(2), Edge(0, 1, A), Edge(1, 0, B))
    assert np.array_equal(r.edges[0][1], A + B.T)
    assert np.array_equal(r.edges[1][0], A.T + B)


def test_normalise_drops_a_sum_of_row_and_column():
    row, column = np.array([1.0, 5.0, 0.5]), np.array([0.25, 2.0, 0.0])
    r = reduction(zeros(2), Edge(0, 1, row[:, None] + column[None, :]))
    r.normalise(0, 1)
    assert r.edges == {0: {}, 1: {}}
    costs = r.costs[0][:, None] + r.costs[1][None, :]
    assert costs == pytest.approx(row[:, None] + column[None, :])


def test_normalise_keeps_the_rest():
    r = reduction(zeros(2), Edge(0, 1, A + 1.0))
    r.normalise(0, 1)
    total = r.costs[0][:, None] + r.costs[1][None, :] + r.edges[0][1]
    assert total == pytest.approx(A + 1.0)
    assert r.edges[0][1].min(axis=0).tolist() == [0.0] * 3
    assert r.edges[0][1].min(axis=1).tolist() == [0.0] * 3


def test_edge_of_a_single_strategy_is_folded():
    r = reduction([[7.0], [0.0] * 3], Edge(0, 1, A[:1]))
    r.normalise(0, 1)
    assert r.edges == {0: {}, 1: {}}
    assert (r.costs[0][0] + r.costs[1]).tolist() == [7.0, 10.0, 8.0]


def test_forbidden_strategies_are_dropped():
    r = reduction([[1.0, inf, 2.0], [0.0] * 3], Edge(0, 1, A))
    r.drop_forbidden(0)
    assert r.strategies[0].tolist() == [0, 2]
    assert np.array_equal(r.edges[1][0], A[[0, 2]].T)


def test_strategy_without_partner_is_dropped():
    costs = A.copy()
    costs[1] = inf
    r = reduction(zeros(2), Edge(0, 1, costs))
    r.normalise(0, 1)
    assert r.strategies[0].tolist() == [0, 2]


def test_dominated_strategy_is_dropped():
    costs = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 4.0], [1.0, 3.5, 1.0]])
    r = reduction([[1.0, 0.0, 1.0], [0.0] * 3], Edge(0, 1, costs))
    assert r.drop_dominated(0)
    assert r.strategies[0].tolist() == [0, 1]


def test_better_node_cost_must_outweigh_the_edges():
    costs = np.array([[0.0, 3.0, 1.0], [2.0, 0.0, 4.0], [1.0, 3.5, 1.0]])
    r = reduction([[1.6, 0.0, 1.0], [0.0] * 3], Edge(0, 1, costs))
    assert not r.drop_dominated(0)


def test_of_equal_strategies_the_first_stays():
    r = reduction([[1.0, 1.0, 1.0], [0.0] * 3], Edge(0, 1, np.tile(A[0], (3, 1))))
    assert r.drop_dominated(0)
    assert r.strategies[0].tolist() == [0]


def test_forbidden_pairs_in_domination():
    allowed_everywhere = [2.0, 2.0, 2.0]
    r = reduction(
        [[0.0, 0.0], [0.0] * 3], Edge(0, 1, np.array([allowed_everywhere, [0.0, inf, 0.0]]))
    )
    assert not r.drop_dominated(0)
    r = reduction([[0.0, 0.0], [0.0] * 3], Edge(0, 1, np.array([[0.0, inf, 0.0], [0.0, 1.0, 0.0]])))
    assert r.drop_dominated(0)
    assert r.strategies[0].tolist() == [1]


@pytest.mark.parametrize("seed", range(20))
def test_equal_edges_are_reduced_like_different_ones(seed):
    """Layers repeat matrices; what is found of one holds for the others, turned round or not."""
    random = np.random.default_rng(seed)
    few = random.integers(0, 6, (3, 3, 3)).astype(float)
    few[0, seed % 3, seed % 2] = inf
    ends = list(combinations(range(5), 2))
    edges = [
        Edge(*ends[k][:: random.choice([-1, 1])], few[random.integers(3)]) for k in range(len(ends))
    ]
    costs = tuple(random.integers(0, 3, (5, 3)).astype(float))
    problem = Problem(node_costs=costs, edges=tuple(edges))
    best = min(map(problem.cost, product(range(3), repeat=5)))
    r = Reduction(problem).run()
    kept = sorted(r.costs)
    lifted = [
        r.lift(dict(zip(kept, choice, strict=True)))
        for choice in product(*(r.strategies[v].tolist() for v in kept))
    ]
    assert min(map(problem.cost, lifted)) == best


def test_degree_0_goes_into_the_constant():
    r = reduction([[3.0, 1.0, 2.0]])
    assert r.eliminate(0)
    assert (r.constant, r.costs, r.lift()) == (1.0, {}, (1,))


def test_degree_1_goes_into_the_neighbour():
    r = reduction([[1.0, 0.0, 2.0], [0.0] * 3], Edge(0, 1, A))
    assert r.eliminate(0)
    assert r.costs[1].tolist() == [1.0, 0.0, 2.0]
    assert [r.lift({1: k}) for k in range(3)] == [(0, 0), (1, 1), (0, 2)]


def test_degree_2_goes_into_an_edge():
    r = reduction([[0.0] * 3, [1.0, 0.0, 2.0], [0.0] * 3], Edge(0, 1, A), Edge(1, 2, B))
    assert r.eliminate(1)
    sums = A[:, :, None] + np.array([1.0, 0.0, 2.0])[None, :, None] + B[None]
    assert np.array_equal(r.edges[0][2], sums.min(axis=1))
    assert r.lift({0: 2, 2: 2})[1] == sums[2, :, 2].argmin()


def test_degree_3_stays():
    r = reduction(zeros(4), *(Edge(0, k, A) for k in (1, 2, 3)))
    assert not r.eliminate(0)


def test_degree_2_stays_where_the_edge_would_be_large():
    large = [0.0] * 100
    narrow = np.arange(200.0).reshape(2, 100)
    r = reduction([large, [0.0, 0.0], large], Edge(1, 0, narrow), Edge(1, 2, narrow))
    assert not r.eliminate(1)


def test_components_come_apart():
    pairs = [(u, v) for u in range(4) for v in range(u + 1, 4)]
    rng = np.random.default_rng(1)
    edges = [Edge(u + k, v + k, rng.random((3, 3))) for k in (0, 4) for u, v in pairs]
    r = reduction(zeros(8), *edges)
    assert [core.nodes for core in r.cores()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert r.cores()[1].problem.edges[0].target == 1


def test_a_series_parallel_graph_needs_nothing_else(all_costs):
    rng = np.random.default_rng(0)
    ends = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4), (4, 5)]
    edges = tuple(Edge(u, v, rng.random((4, 4))) for u, v in ends)
    problem = Problem(node_costs=tuple(rng.random(4) for _ in range(6)), edges=edges)
    r = Reduction(problem).run()
    best = all_costs(problem).min()
    assert r.cores() == []
    assert r.constant == pytest.approx(best)
    assert problem.cost(r.lift()) == pytest.approx(best)


def test_infeasible_after_elimination_names_the_eliminated_too():
    left = np.array([[0.0, inf], [0.0, inf]])
    right = np.array([[inf, 0.0], [inf, 0.0]])
    with pytest.raises(InfeasibleError) as error:
        reduction([[0.0, 0.0]] * 3, Edge(0, 1, left), Edge(2, 1, right)).run()
    assert 1 in error.value.nodes
    assert {0, 2} & set(error.value.nodes)
