"""Small layers begin where few bytes cross, at the same places of equal blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.layers import narrow

BLOCK = ((0, 1), (3, 9), (1, 9), (0, 1), (4, 9), (4, 9))
"""FLOPs of each op, and bytes that cross before it: an attention, and a feed-forward part."""


def model(blocks: int, head: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    flops, crossing = zip(*(BLOCK * blocks), strict=True)
    return np.array([*flops, 0, head], float), np.array([*crossing, 1, 9], float)


@pytest.mark.parametrize(
    ("most", "starts"),
    [
        (23, range(0, 60, 3)),  # each attention and each feed-forward part
        (10, range(0, 60, 6)),  # blocks
        (6, range(0, 54, 9)),  # one block and a half
        (1, [0]),
    ],
)
def test_layers_begin_at_the_same_places_of_blocks(most: int, starts: range) -> None:
    assert narrow.solve(*model(10), 1.0, most) == tuple(starts)


def test_what_is_large_behind_the_blocks_is_a_layer_of_its_own() -> None:
    assert narrow.solve(*model(10, head=12.0), 1.0, 11) == (*range(0, 60, 6), 60)


def test_where_all_places_are_wide_there_is_one_layer() -> None:
    flops, crossing = model(10)
    assert narrow.solve(flops, crossing + 1, 1.0, 20) == (0,)


@settings(deadline=None, max_examples=200)
@given(
    ops=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=40),
    most=st.integers(1, 12),
)
def test_layers_are_few_large_and_begin_at_narrow_places(
    ops: list[tuple[int, int]], most: int
) -> None:
    flops, crossing = np.array(ops, float).T
    starts = narrow.solve(flops, crossing, 1.0, most)
    assert starts[0] == 0
    assert len(starts) <= most
    assert all(crossing[start] <= 1.0 for start in starts[1:])
    ends = *starts, len(ops)
    if len(starts) > 1:
        least = flops.sum() / (2 * most)
        assert min(flops[a:b].sum() for a, b in pairwise(ends)) >= least * (1 - 1e-12)
