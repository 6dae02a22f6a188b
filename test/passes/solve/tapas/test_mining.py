from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.sharding.problem import Edge, Problem
from alpa.passes.solve.sharding.tie import tie
from alpa.passes.solve.tapas.mining import mine


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_equal_layers_are_one_subgraph(layered: Callable[..., Problem], depth: int) -> None:
    mined = mine(layered(0, depth), min_size=8)
    (subgraph,) = mined.subgraphs
    first = subgraph.instances[0]
    assert sorted(first) == list(range(1, 9))
    assert subgraph.instances == tuple(
        tuple(node + 8 * layer for node in first) for layer in range(depth)
    )
    assert (mined.layers, mined.min_support, mined.missed_ends) == (depth, depth, False)
    assert mined.parts == ((0,), (1 + 8 * depth,))
    assert mined.num_unique == 3


def test_ends_that_differ_lower_the_support(
    layered: Callable[..., Problem],
) -> None:
    problem = layered(0, 8, ends=True)
    mined = mine(problem, min_size=8)
    assert (mined.layers, mined.min_support, mined.missed_ends) == (8, 6, True)
    assert [(one.support, one.size) for one in mined.subgraphs] == [(7, 8)]
    # With the number of layers as support, the node that differs is no part of the subgraph.
    fixed = mine(problem, min_support=8, min_size=2)
    assert [(one.support, one.size) for one in fixed.subgraphs] == [(8, 6)]


def test_small_subgraphs_are_not_significant(layered: Callable[..., Problem]) -> None:
    problem = layered(0, 3)
    assert [one.size for one in mine(problem, min_size=8).subgraphs] == [8]
    mined = mine(problem, min_size=9)
    assert not mined.subgraphs
    assert mined.colors(26) == list(range(26))


def test_nothing_is_repeated_in_a_random_problem(random_problem: Callable[..., Problem]) -> None:
    mined = mine(random_problem(0), min_size=2)
    assert (mined.layers, mined.subgraphs, mined.num_unique) == (0, (), 1)


def test_a_shared_tensor_is_a_part_of_its_own() -> None:
    # Two chains that differ, which read node 0; node 7 has nothing to choose.
    rng = np.random.default_rng(0)
    nodes = [*(rng.random(2) for _ in range(7)), np.zeros(1)]
    ends = [(0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (5, 6)]
    edges = tuple(Edge(u, v, rng.random((2, 2))) for u, v in ends)
    problem = Problem(node_costs=tuple(nodes), edges=edges)
    assert mine(problem).parts == ((0, 1, 2, 3, 4, 5, 6),)
    assert mine(problem, tensors=[0, 3]).parts == ((0,), (1, 2, 3), (4, 5, 6))


def test_a_chain_of_equal_nodes_is_cut_into_equal_pieces() -> None:
    costs, matrix = np.array([0.0, 1.0]), np.array([[0.0, 2.0], [3.0, 0.0]])
    edges = tuple(Edge(u, v, matrix) for u, v in pairwise(range(16)))
    problem = Problem(node_costs=(costs,) * 16, edges=edges)
    mined = mine(problem, min_support=4, min_size=2)
    assert [(one.support, one.size) for one in mined.subgraphs] == [(4, 4)]


@given(seed=st.integers(0, 1000), support=st.integers(2, 4), size=st.integers(2, 6))
def test_what_is_mined_is_equal_and_does_not_overlap(
    layered: Callable[..., Problem], seed: int, support: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    problem = layered(seed % 7, int(rng.integers(2, 6)), ends=bool(rng.integers(2)))
    mined = mine(problem, min_support=support, min_size=size)
    instances = [nodes for one in mined.subgraphs for nodes in one.instances]
    covered = [node for nodes in (*instances, *mined.parts) for node in nodes]
    assert sorted(covered) == list(range(len(problem.node_costs)))
    edges = {(e.source, e.target): e.costs.tobytes() for e in problem.edges}
    for one in mined.subgraphs:
        assert one.support >= support
        assert one.size >= size
        seen = {
            (
                tuple(problem.node_costs[v].tobytes() for v in nodes),
                tuple(edges.get((u, v)) for u in nodes for v in nodes),
            )
            for nodes in one.instances
        }
        assert len(seen) == 1
    # A choice of the folded problem costs the same in the whole one.
    folded, node_class = tie(problem, mined.colors(len(problem.node_costs)))
    few = [int(rng.integers(costs.size)) for costs in folded.node_costs]
    assert problem.cost([few[c] for c in node_class]) == pytest.approx(folded.cost(few), rel=1e-9)
