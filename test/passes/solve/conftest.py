"""Small random sharding problems and their optimum by brute force."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from alpa.passes.solve.sharding.ilp import Edge, Problem


def _all_costs(problem: Problem) -> np.ndarray:
    """The cost of every choice, one dimension per node."""
    count = len(problem.node_costs)
    total = np.zeros((1,) * count)
    for node, costs in enumerate(problem.node_costs):
        total = total + costs.reshape([-1 if k == node else 1 for k in range(count)])
    for edge in problem.edges:
        first, last = sorted((edge.source, edge.target))
        costs = edge.costs if edge.source == first else edge.costs.T
        shape = [1] * count
        shape[first], shape[last] = costs.shape
        total = total + costs.reshape(shape)
    return total


def _random_problem(seed: int, *, nodes: int = 7, strategies: int = 4) -> Problem:
    """Dense, all strategies allowed, every node with at least three neighbours."""
    rng = np.random.default_rng(seed)
    edges = [
        Edge(u, v, rng.random((strategies, strategies)) * 1e-3)
        for u in range(nodes)
        for v in range(u + 1, nodes)
        if v - u <= 2 or rng.random() < 0.5
    ]
    return Problem(
        node_costs=tuple(rng.random(strategies) * 1e-3 for _ in range(nodes)), edges=tuple(edges)
    )


@pytest.fixture(scope="session")
def all_costs() -> Callable[[Problem], np.ndarray]:
    return _all_costs


@pytest.fixture(scope="session")
def random_problem() -> Callable[..., Problem]:
    return _random_problem
