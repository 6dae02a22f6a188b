"""Sharding problems of layers that repeat."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from alpa.passes.solve.sharding.problem import Edge, Problem


def _layered(
    seed: int, depth: int, *, width: int = 8, strategies: int = 3, ends: bool = False
) -> Problem:
    """Equal layers in a chain between two nodes that differ; a layer is a chain of `width` nodes.

    With `ends`, a node of the first layer and one of the last have other costs.
    """
    rng = np.random.default_rng(seed)

    def matrix() -> np.ndarray:
        return rng.random((strategies, strategies))

    inner = [rng.random(strategies) for _ in range(width)]
    within = {(u, v): matrix() for u, v in pairwise(range(width))}
    between, into, out = matrix(), matrix(), matrix()
    nodes = [rng.random(strategies), *inner * depth, rng.random(strategies)]
    if ends:
        nodes[1], nodes[-2] = rng.random(strategies), rng.random(strategies)
    edges = [Edge(0, 1, into), Edge(len(nodes) - 2, len(nodes) - 1, out)]
    for layer in range(depth):
        start = 1 + layer * width
        edges += [Edge(start + u, start + v, costs) for (u, v), costs in within.items()]
        if layer + 1 < depth:
            edges.append(Edge(start + width - 1, start + width, between))
    return Problem(node_costs=tuple(nodes), edges=tuple(edges))


@pytest.fixture(scope="session")
def layered() -> Callable[..., Problem]:
    return _layered
