from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import place, submeshes


def test_submeshes():
    assert submeshes(3, 4) == ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))
    assert submeshes(1, 1) == ((1, 1),)
    assert submeshes(2, 1) == ((1, 1), (2, 1))
    assert submeshes(2, 6) == ((1, 1), (1, 2), (1, 6), (2, 6))
    assert submeshes(1, 3) == ((1, 1), (1, 3))


@st.composite
def coverings(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    hosts, devices = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    left = hosts * devices  # Any shapes that have so many devices together are a covering.
    shapes: list[tuple[int, int]] = []
    while left:
        known = [(n, m) for n, m in submeshes(hosts, devices) if n * m <= left]
        shapes.append(draw(st.sampled_from(known)))
        left -= shapes[-1][0] * shapes[-1][1]
    return hosts, devices, shapes


@settings(max_examples=300)
@given(covering=coverings())
def test_every_device_once_and_aligned(covering):
    hosts, devices, shapes = covering
    placed = place(hosts, devices, shapes)
    everything = [(h, d) for h in range(hosts) for d in range(devices)]
    assert sorted(device for mesh in placed for device in mesh) == everything
    for (n, m), mesh in zip(shapes, placed, strict=True):
        first_host, first = mesh[0]
        assert mesh == tuple((first_host + h, first + d) for h in range(n) for d in range(m))
        assert first % m == 0


def test_neighbours_lie_side_by_side():
    placed = place(2, 4, [(1, 2), (1, 4), (1, 2)])
    assert placed == [((1, 0), (1, 1)), tuple((0, d) for d in range(4)), ((1, 2), (1, 3))]
    growing = place(2, 4, [(1, 1), (1, 1), (1, 2), (1, 4)])
    assert [mesh[0] for mesh in growing] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    inside = place(2, 4, [(1, 1), (1, 2), (1, 1), (1, 4)])
    assert [mesh[0] for mesh in inside] == [(0, 2), (0, 0), (0, 3), (1, 0)]
