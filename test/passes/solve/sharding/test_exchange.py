"""Parts of two assignments that can be exchanged apart from each other."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse  # pyright: ignore[reportMissingTypeStubs]
from scipy.sparse import csgraph  # pyright: ignore[reportMissingTypeStubs]

from alpa.passes.solve.sharding.exchange import connected


@given(st.data())
def test_components_are_those_that_scipy_finds(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    node = st.integers(0, count - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=15))
    some = np.array([a for a, b in edges] + [b for a, b in edges], dtype=int)
    others = np.array([b for a, b in edges] + [a for a, b in edges], dtype=int)
    graph = cast("Any", sparse).coo_matrix((np.ones(some.size), (some, others)), (count, count))
    _, expected = cast("Any", csgraph).connected_components(graph, directed=False)
    assert connected(count, some, others).tolist() == expected.tolist()


def test_components_of_a_long_path() -> None:
    nodes = np.random.default_rng(0).permutation(1000)
    some, others = np.hstack([nodes[:-1], nodes[1:]]), np.hstack([nodes[1:], nodes[:-1]])
    assert not connected(1000, some, others).any()
