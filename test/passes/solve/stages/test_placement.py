from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import (
    Group,
    few_submeshes,
    orders,
    place,
    submeshes,
)


def test_submeshes():
    assert submeshes(3, 4) == ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4))
    assert submeshes(1, 1) == ((1, 1),)
    assert submeshes(2, 1) == ((1, 1), (2, 1))
    assert submeshes(2, 6) == ((1, 1), (1, 2), (1, 3), (1, 6), (2, 6))
    assert submeshes(2, 3) == ((1, 1), (1, 3), (2, 3))
    for power in range(8):
        assert [m for _, m in submeshes(1, 1 << power)] == [1 << p for p in range(power + 1)]


def sizes_in_host(hosts: int, devices: int) -> list[int]:
    return [m for n, m in submeshes(hosts, devices) if n == 1]


def test_all_divisors_of_few_devices_are_taken():
    for devices in range(1, 30):
        divisors = [m for m in range(1, devices + 1) if devices % m == 0]
        assert sizes_in_host(2, devices) == divisors
    assert sizes_in_host(2, 30) == [1, 2, 5, 10, 15, 30]
    assert sizes_in_host(2, 72) == [1, 2, 4, 6, 8, 12, 18, 24, 36, 72]


def test_a_single_host_takes_all_sizes_unless_they_are_many_or_powers_of_two():
    for devices in range(1, 16):
        if devices not in (1, 2, 4, 8):
            assert sizes_in_host(1, devices) == [*range(1, devices + 1)]
    for devices in (1, 2, 4, 8, 16, 18, 24, 30, 72):
        assert sizes_in_host(1, devices) == sizes_in_host(2, devices)


def short_of_a_host(
    sizes: Sequence[int], devices: int, total: int = 0, sums: int = 1
) -> Iterator[int]:
    """The sums of all multisets of sizes without a part that has exactly so many devices.

    Args:
        total: of the sizes that are taken already.
        sums: the sums of their parts, as bits.
    """
    if not sizes:
        yield total
        return
    while not sums >> devices & 1:
        yield from short_of_a_host(sizes[1:], devices, total, sums)
        total, sums = total + sizes[0], sums | sums << sizes[0]


@pytest.mark.parametrize("devices", [*range(1, 33), 36, 42])
def test_stages_always_fill_hosts(devices: int):
    """On any number of hosts: if stages have as many devices as some hosts, one of these can be
    filled, and then the next."""
    sizes = sizes_in_host(2, devices)
    assert [it for it in short_of_a_host(sizes, devices) if it % devices == 0] == [0]


def test_not_all_divisors_always_fill_hosts():
    divisors = [1, 2, 3, 5, 6, 10, 15, 30]
    assert {it for it in short_of_a_host(divisors, 30) if it % 30 == 0} == {0, 60}
    assert 12 in short_of_a_host([4, 6], 6)


def test_on_few_hosts_all_submeshes_are_tried():
    for hosts in range(1, 9):
        assert few_submeshes(hosts, 8, 1) == submeshes(hosts, 8)


def test_on_many_hosts_submeshes_grow_with_the_logarithm_of_the_hosts():
    taken = [n for n, m in few_submeshes(16, 8, 16) if m == 8]
    assert taken == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    found = few_submeshes(512, 8, 16)
    assert found[:4] == ((4, 8), (8, 8), (12, 8), (16, 8))
    assert found[-1] == (512, 8)
    assert len(found) == 24
    assert len(few_submeshes(1024, 8, 16)) == 24  # 8 hosts are 1/8 of an even share


def test_equal_stages_are_possible_on_any_number_of_hosts():
    for hosts in (9, 15, 77, 513):
        found = few_submeshes(hosts, 8, 16)
        for stages in range(1, 17):
            assert hosts % stages or (hosts // stages, 8) in found


def test_orders_of_hosts():
    assert list(orders([(512, 8)])) == [(Group(0, 512, 8),)]
    assert list(orders([(1, 8), (1, 4)])) == [
        (Group(0, 1, 8), Group(1, 1, 4)),
        (Group(1, 1, 4), Group(0, 1, 8)),
    ]
    assert len(list(orders([(2, 8), (2, 8)]))) == 6
    assert (Group(0, 1, 8), Group(1, 2, 8), Group(0, 1, 8)) in list(orders([(2, 8), (2, 8)]))
    assert len(list(orders([(1, 8), (23, 8)]))) == 24
    assert len(list(orders([(40, 8), (20, 4)]))) == 2
    assert len(list(orders([(3, 8)] * 4))) == 24
    turned = [tuple(group.kind for group in order) for order in orders([(3, 8)] * 6)]
    assert len(set(turned)) == len(turned) == 12
    assert turned[:2] == [(0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 0)]
    assert turned[6] == (5, 4, 3, 2, 1, 0)


@st.composite
def coverings(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]]]:
    hosts, devices = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24, 30]))
    left = hosts * devices  # Any shapes that have so many devices together are a covering.
    shapes: list[tuple[int, int]] = []
    while left:
        known = [(n, m) for n, m in submeshes(hosts, devices) if n * m <= left]
        shapes.append(draw(st.sampled_from(known)))
        left -= shapes[-1][0] * shapes[-1][1]
    return hosts, devices, shapes


def check_placed(hosts: int, devices: int, shapes: Sequence[tuple[int, int]]) -> None:
    """Every device is used once, and a submesh whose size divides a host's, if all of them do,
    begins at a multiple of its size in a host."""
    placed = place(hosts, devices, shapes)
    everything = [(h, d) for h in range(hosts) for d in range(devices)]
    assert sorted(device for mesh in placed for device in mesh) == everything
    for (n, m), mesh in zip(shapes, placed, strict=True):
        first_host, first = mesh[0]
        assert mesh == tuple((first_host + h, first + d) for h in range(n) for d in range(m))
        assert first % m == 0 or any(devices % size for _, size in shapes)


@settings(max_examples=300)
@given(covering=coverings())
def test_every_device_once_and_aligned(covering):
    check_placed(*covering)


def multisets(sizes: Sequence[tuple[int, int]], total: int) -> Iterator[list[tuple[int, int]]]:
    """All multisets of submeshes that have so many devices together, from small to large."""
    if not sizes:
        if total == 0:
            yield []
        return
    n, m = sizes[-1]
    for count in range(total // (n * m) + 1):
        for rest in multisets(sizes[:-1], total - count * n * m):
            yield rest + [sizes[-1]] * count


@pytest.mark.parametrize(
    ("hosts", "devices"),
    [(4, 3), (3, 6), (3, 8), (2, 9), (2, 10), (2, 12), (2, 15), (1, 7), (1, 12)],
)
def test_all_multisets_are_placed(hosts: int, devices: int):
    for shapes in multisets(submeshes(hosts, devices), hosts * devices):
        check_placed(hosts, devices, shapes)
        check_placed(hosts, devices, shapes[::2] + shapes[1::2])


def test_neighbours_lie_side_by_side():
    placed = place(2, 4, [(1, 2), (1, 4), (1, 2)])
    assert placed == [((1, 0), (1, 1)), tuple((0, d) for d in range(4)), ((1, 2), (1, 3))]
    growing = place(2, 4, [(1, 1), (1, 1), (1, 2), (1, 4)])
    assert [mesh[0] for mesh in growing] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    inside = place(2, 4, [(1, 1), (1, 2), (1, 1), (1, 4)])
    assert [mesh[0] for mesh in inside] == [(0, 2), (0, 0), (0, 3), (1, 0)]
    six = place(2, 6, [(1, 1), (1, 6), (1, 3), (1, 2)])
    assert [mesh[0] for mesh in six] == [(1, 3), (0, 0), (1, 0), (1, 4)]
    uneven = place(1, 14, [(1, 2), (1, 3), (1, 3), (1, 3), (1, 3)])
    assert [mesh[0] for mesh in uneven] == [(0, 0), (0, 2), (0, 5), (0, 8), (0, 11)]
