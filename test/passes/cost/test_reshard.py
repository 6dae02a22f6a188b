from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_gather, all_to_all, collective_permute
from alpa.passes.cost.reshard import ReshardTable, enumerate_layouts

MESH = LogicalMesh.of(Cluster.parse("v100-16gb:2x4,ideal"), 2, 4, (2, 4))
SHAPE, ITEMSIZE = (64, 128), 4
M = 64 * 128 * 4.0
R, S0, S1, S01 = (), (0,), (1,), (0, 1)

tables = st.sampled_from([ReshardTable(MESH, rank) for rank in (1, 2, 3)])
even_sizes = st.sampled_from([8, 16, 64, 1024])


@pytest.fixture
def table():
    return ReshardTable(MESH, 2)


def test_layouts_of_table_1():
    assert set(enumerate_layouts(2, 2)) == {
        (R, R), (S0, S1), (S1, S0), (S0, R), (S1, R), (R, S0), (R, S1), (S01, R), (R, S01),
    }  # fmt: skip
    assert enumerate_layouts(2, 2)[0] == (R, R)
    assert set(enumerate_layouts(2, 1, any_order=True)) == {(R,), (S0,), (S1,), (S01,), ((1, 0),)}
    assert enumerate_layouts(2, 0) == [()]


@pytest.mark.parametrize("rank", range(5))
def test_count_of_layouts(rank):
    in_any_order = enumerate_layouts(2, rank, any_order=True)
    assert len(in_any_order) == len(set(in_any_order)) == rank**2 + 3 * rank + 1
    assert len(enumerate_layouts(2, rank)) == (rank + 1) ** 2


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        ((R, R), (S0, S1), [("slice", 0, 0.0), ("slice", 1, 0.0)]),
        ((S0, S1), (S0, R), [("all-gather", 1, M / 2)]),
        ((S1, R), (R, S1), [("all-to-all", 1, M / 4)]),
        ((S0, S1), (S01, R), [("all-to-all", 1, M / 8)]),
    ],
)
def test_cases_of_table_2(table, source, target, steps):
    path = table.path(source, target, SHAPE, ITEMSIZE)
    assert [(step.kind, *step.axes, step.bytes) for step in path] == steps


def test_all_gather_may_send_a_part_only(table):
    """Case 2 of table 2, S0 R -> R R: a quarter crosses the slow axis, the rest the fast one."""
    path = table.path((S0, R), (R, R), (2**12, 2**12), ITEMSIZE)
    size = 2.0**24 * ITEMSIZE
    assert [(step.kind, *step.axes, step.bytes) for step in path] == [
        ("slice", 1, 0.0),
        ("all-gather", 0, size / 4),
        ("all-gather", 1, size),
    ]
    expected = all_gather(MESH, 0, size / 4) + all_gather(MESH, 1, size)
    assert table.cost((S0, R), (R, R), (2**12, 2**12), ITEMSIZE) == pytest.approx(expected)
    assert expected < all_gather(MESH, 0, size)


def test_several_axes_of_a_measured_mesh_go_together():
    mesh = LogicalMesh.of(Cluster.parse("h100:1x8"), 1, 8, (2, 4))
    table, large, size = ReshardTable(mesh, 2), (2**12, 2**12), 2.0**24 * ITEMSIZE

    def steps(source, target):
        path = table.path(source, target, large, ITEMSIZE)
        return [(step.kind, step.axes, step.bytes) for step in path]

    assert steps((S01, R), (R, R)) == [("all-gather", (0, 1), size)]
    assert steps((S01, R), (R, S01)) == [("all-to-all", (0, 1), size / 8)]
    assert table.cost((S01, R), (R, R), large, ITEMSIZE) == all_gather(mesh, (0, 1), size)


def test_axes_change_places_by_a_collective_permute():
    square = LogicalMesh.of(Cluster.parse("h100:2x2"), 2, 2, (2, 2))
    table = ReshardTable(square, 2)

    def steps(source, target):
        path = table.path(source, target, SHAPE, ITEMSIZE)
        return [(step.kind, step.axes, step.bytes) for step in path]

    both = ("collective-permute", (0, 1))
    assert steps((S01, R), ((1, 0), R)) == [(*both, M / 4)]  # another order
    assert steps((S0, S1), (S1, S0)) == [(*both, M / 4)]
    assert steps((S0, R), (S1, R)) == [(*both, M / 2)]  # another axis of the same size
    assert table.cost((S0, S1), (S1, S0), SHAPE, ITEMSIZE) == collective_permute(
        square, (0, 1), M / 4
    )


def test_other_axes_of_another_size_are_no_permutation(table):
    kinds = [step.kind for step in table.path((S0, R), (S1, R), (2**12, 2**12), ITEMSIZE)]
    assert "all-gather" in kinds


def test_times_are_those_of_the_collectives(table):
    cost = table.cost((S1, R), (R, S1), SHAPE, ITEMSIZE)
    assert cost == all_to_all(MESH, 1, M / 4)
    assert table.cost((R, S1), (R, R), SHAPE, ITEMSIZE) == all_gather(MESH, 1, M)


@settings(max_examples=60, deadline=None)
@given(table=tables, size=even_sizes, data=st.data())
def test_diagonal_and_triangle(table, size, data):
    shape = (size,) * table.rank
    costs = table.matrix(table.layouts, table.layouts, shape, 2)
    assert not costs.diagonal().any()
    assert (costs >= 0).all()
    assert np.isfinite(costs).all()
    through = (costs[:, :, None] + costs[None, :, :]).min(axis=1)
    assert (costs <= through * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(table=tables, size=even_sizes, itemsize=st.sampled_from([1, 2, 4, 8]))
def test_monotone_in_bytes(table, size, itemsize):
    shape = (size,) * table.rank
    small = table.matrix(table.layouts, table.layouts, shape, itemsize)
    large = table.matrix(table.layouts, table.layouts, shape, 2 * itemsize)
    assert (small <= large).all()
    assert (large <= 2 * small * (1 + 1e-12)).all()


@settings(max_examples=200, deadline=None)
@given(table=tables, size=even_sizes, data=st.data())
def test_path_leads_from_source_to_target(table, size, data):
    shape = (size,) * table.rank
    source = data.draw(st.sampled_from(table.layouts))
    target = data.draw(st.sampled_from(table.layouts))
    path = table.path(source, target, shape, 4)
    assert sum(step.seconds for step in path) == pytest.approx(table.cost(source, target, shape, 4))
    if path:
        assert path[-1].layout == target
    else:
        assert source == target


def test_matrix_is_cost_by_cost(table):
    sources, targets = [(S0, R), (R, S01)], [(R, R), (S1, S0), (R, S0)]
    matrix = table.matrix(sources, targets, SHAPE, ITEMSIZE)
    assert matrix.tolist() == [
        [table.cost(source, target, SHAPE, ITEMSIZE) for target in targets] for source in sources
    ]


def test_no_path_through_a_dimension_that_does_not_divide(table):
    for step in table.path((R, S01), (R, S1), (3, 64), ITEMSIZE):
        assert step.layout[0] == R


def test_an_uneven_end_is_padded(table):
    """No pair of layouts offers three rows over two devices, but a user may request them."""
    (step,) = table.path((S0, R), (R, R), (3, 1), ITEMSIZE)
    assert (step.kind, step.bytes) == ("all-gather", 16.0)


def test_scalars():
    assert ReshardTable(MESH, 0).matrix([()], [()], (), 4).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("source", "shape", "message"),
    [
        ((S0, S0), SHAPE, r"\(\(0,\), \(0,\)\) is no layout of a rank-2 tensor"),
        ((S0,), SHAPE, "is no layout of a rank-2"),
        ((R, (2,)), SHAPE, "mesh of 2 axes"),
        ((R, R), (64,), r"shape \(64,\) has rank 1, not 2"),
    ],
)
def test_errors(table, source, shape, message):
    with pytest.raises(ValueError, match=message):
        table.cost(source, (R, R), shape, ITEMSIZE)
