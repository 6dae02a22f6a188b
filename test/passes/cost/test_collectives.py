from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster, Link
from alpa.passes.cost.collectives import (
    LogicalMesh,
    all_gather,
    all_reduce,
    all_to_all,
    collective_permute,
    reduce_scatter,
)
from alpa.passes.cost.device import Curve

CLUSTER = Cluster.parse("v100-16gb:4x8,ideal")
FAST, SLOW = 150e9, 3.125e9


def mesh(*sizes: int, bandwidth: float = 1e9, latency: float = 1e-6) -> LogicalMesh:
    link = Link(bandwidth=bandwidth, latency=latency)
    names = ("x", "y", "z")[: len(sizes)]
    return LogicalMesh(axis_names=names, sizes=sizes, links=(link,) * len(sizes))


def test_ring_formulas():
    four = mesh(4)
    assert all_gather(four, 0, 4e9) == pytest.approx(3e-6 + 3.0)
    assert reduce_scatter(four, 0, 4e9) == pytest.approx(3e-6 + 3.0)
    assert all_to_all(four, 0, 4e9) == pytest.approx(3e-6 + 3.0)
    assert all_reduce(four, 0, 4e9) == pytest.approx(6e-6 + 6.0)


def test_an_axis_of_one_is_free():
    for collective in (all_gather, reduce_scatter, all_to_all, all_reduce):
        assert collective(mesh(1), 0, 1e9) == 0.0


def test_arrays_of_bytes():
    sizes = np.array([0.0, 1e6, 4e9])
    seconds = all_reduce(mesh(2, 4), (0, 1), sizes)
    assert seconds == pytest.approx([all_reduce(mesh(2, 4), (0, 1), b) for b in sizes])


def test_all_reduce_over_all_axes_is_one_over_their_product():
    assert all_reduce(mesh(2, 4, latency=0.0), (0, 1), 8e9) == pytest.approx(14.0)
    assert all_reduce(mesh(2, 4), (0, 1), 8e9) == all_reduce(mesh(2, 4), (1, 0), 8e9)


def test_all_reduce_takes_the_fast_axis_first():
    links = (Link(bandwidth=1e9, latency=0.0), Link(bandwidth=100e9, latency=0.0))
    both = LogicalMesh(axis_names=("x", "y"), sizes=(2, 4), links=links)
    fast_first = 2 * (3 / 4 * 8e9 / 100e9 + 1 / 2 * 2e9 / 1e9)
    assert all_reduce(both, (0, 1), 8e9) == pytest.approx(fast_first)


@pytest.mark.parametrize(
    ("hosts", "devices", "shape", "bandwidths"),
    [
        (1, 8, (8,), (FAST,)),
        (1, 8, (2, 4), (FAST, FAST)),
        (1, 4, (4, 1), (FAST, FAST)),
        # Eight devices of a host, each in a ring of its own over the hosts.
        (4, 8, (4, 8), (SLOW / 8, FAST)),
        # One ring passes through all hosts.
        (4, 8, (1, 32), (FAST, SLOW)),
        # Axis 0: hosts in pairs, with a step of 4 devices.
        (4, 8, (8, 4), (SLOW / 4, FAST)),
        (4, 8, (2, 16), (SLOW / 8, SLOW)),
    ],
)
def test_bandwidth_of_a_view(hosts, devices, shape, bandwidths):
    view = LogicalMesh.of(CLUSTER, hosts, devices, shape)
    assert tuple(link.bandwidth for link in view.links) == bandwidths
    assert [link.latency for link in view.links] == [
        5e-6 if bandwidth == FAST else 20e-6 for bandwidth in bandwidths
    ]


def test_all_to_all_leaves_the_host_from_every_device():
    """On two hosts of eight devices each device sends half of its bytes through the shared link."""
    view = LogicalMesh.of(Cluster.parse("v100-16gb:2x8,ideal"), 2, 8, (16,))
    assert all_to_all(view, 0, 1e9) == pytest.approx(15 * 20e-6 + 8 * 0.5e9 / SLOW)


def test_all_to_all_between_hosts_equals_the_ring():
    view = LogicalMesh.of(CLUSTER, 4, 8, (4, 8))
    assert view.exchange_links[0].bandwidth == pytest.approx(view.links[0].bandwidth)


MIB = 2.0**20
MEASURED = [
    # cluster, hosts, devices, collective, seconds to start, bytes/s of what one device holds
    ("a100-80gb", 1, 8, all_reduce, 76e-6, 201e9 / 1.75),
    ("h200", 1, 8, all_reduce, 48e-6, 462e9 / 1.75),
    ("b200", 1, 8, all_reduce, 53e-6, 736e9 / 1.75),
    ("b200", 4, 8, all_reduce, 411e-6, 384e9 / 1.9375),
    *(
        ("h100", 1, devices, collective, start, rate)
        for collective in (all_gather, reduce_scatter)
        for devices, start, rate in ((2, 8e-6, 537e9), (4, 17e-6, 434e9), (8, 30e-6, 394e9))
    ),
    ("h100", 1, 2, all_reduce, 10e-6, 324e9),
    ("h100", 1, 4, all_reduce, 15e-6, 236e9),
    ("h100", 1, 8, all_reduce, 31e-6, 267e9),
    ("h100", 2, 8, all_reduce, 53e-6, 267e9),
    ("h100", 4, 8, all_reduce, 81e-6, 160e9),
    ("h100", 32, 8, all_reduce, 165e-6, 160e9),
    ("h100", 1, 8, all_to_all, 50e-6, 380e9),
]
"""Fits of public measurements: A100, H200, B200 of Bekman, Machine Learning Engineering; H100 of
AutoParallel's tables."""


@pytest.mark.parametrize(("name", "hosts", "devices", "collective", "start", "rate"), MEASURED)
def test_presets_are_near_measurements(name, hosts, devices, collective, start, rate):
    cluster = Cluster.parse(f"{name}:{hosts}x{devices}")
    view = LogicalMesh.of(cluster, hosts, devices, (hosts * devices,))
    sizes = np.array([2.0**n * MIB for n in range(13)])
    ratios = collective(view, 0, sizes) / (start + sizes / rate)
    assert 0.75 <= ratios.min() <= ratios.max() <= 1.25


def test_one_all_reduce_for_several_axes():
    """Two axes of a host and its hosts are reduced like one axis over all devices."""
    cluster = Cluster.parse("h100:4x8")
    flat = LogicalMesh.of(cluster, 4, 8, (32,))
    for shape in ((4, 8), (8, 4), (2, 16)):
        view = LogicalMesh.of(cluster, 4, 8, shape)
        assert all_reduce(view, (0, 1), 1e9) == pytest.approx(all_reduce(flat, 0, 1e9))
        assert all_reduce(view, (0, 1), 1e9) == all_reduce(view, (1, 0), 1e9)


@pytest.mark.parametrize("collective", [all_gather, reduce_scatter, all_to_all])
def test_one_collective_for_several_axes_of_a_host(collective: Callable[..., float]) -> None:
    cluster = Cluster.parse("h100:1x8")
    flat, view = (LogicalMesh.of(cluster, 1, 8, shape) for shape in ((8,), (2, 4)))
    assert collective(view, (0, 1), 1e9) == collective(flat, 0, 1e9)
    ideal = LogicalMesh.of(Cluster.parse("h100:1x8,ideal"), 1, 8, (2, 4))
    parts = (1e9, 1e9) if collective is all_to_all else (1e9, 1e9 / 2)
    expected = sum(collective(ideal, axis, part) for axis, part in enumerate(parts))
    assert collective(ideal, (0, 1), 1e9) == expected


def test_groups_of_a_host_share_its_network():
    """Eight groups over hosts, each with one device of a host: an eighth of the network each."""
    cluster = Cluster.parse("h100:4x8")
    across, slow = LogicalMesh.of(cluster, 4, 8, (4, 8)), cluster.inter_host
    share = slow.bandwidth / 8
    assert all_reduce(across, 0, 1e9) == pytest.approx(4 * slow.latency + 1.5e9 / share)
    assert all_gather(across, 0, 1e9) == pytest.approx(3 * slow.latency + 0.75e9 / share)
    assert all_to_all(across, 0, 1e9) == pytest.approx(3 * slow.latency + 0.75e9 / share)


def test_an_all_reduce_over_parts_of_hosts_is_hierarchical():
    """Two devices of each of four hosts: the slower of host and network counts."""
    cluster = Cluster.parse("h100:4x8")
    parts = LogicalMesh.of(cluster, 4, 8, (8, 4))
    slow = cluster.inter_host
    assert all_reduce(parts, 0, 1e9) == pytest.approx(
        10e-6 + 4 * slow.latency + 1.5 * 4 * 1e9 / slow.bandwidth
    )


def test_computation_hides_a_share():
    for name in ("h100:1x8", "v100-16gb:1x8,ideal"):
        shown = Cluster.parse(name)
        half = replace(shown, intra_host=replace(shown.intra_host, overlap=0.5))
        for collective in (all_gather, all_reduce, all_to_all):
            all_, hidden = (
                collective(LogicalMesh.of(cluster, 1, 8, (8,)), 0, 1e6) for cluster in (shown, half)
            )
            assert hidden == pytest.approx(all_ / 2)


def test_group_sizes_between_measured_ones():
    """Two V100s share a link of six or more, four devices four. Six are between four and eight."""
    cluster = Cluster.parse("v100-16gb:1x8")

    def rate(size: int) -> float:
        view = LogicalMesh.of(replace(cluster, devices_per_host=size), 1, size, (size,))
        return 1e15 / all_gather(view, 0, 1e15)

    assert rate(2) == pytest.approx(2 * 20e9)
    assert rate(4) == pytest.approx(4 / 3 * 80e9)
    assert rate(8) == pytest.approx(8 / 7 * 120e9)
    assert rate(4) < rate(6) < rate(8)


def test_group_sizes_between_measured_curves():
    """Three devices lie between two and four, at each number of bytes."""
    cluster = Cluster.parse("v100-16gb:1x4")
    curves = {2: Curve(((1e3, 1e-5), (1e6, 1e-3))), 4: Curve(((1e4, 4e-5), (1e6, 3e-3)))}
    link = replace(cluster.intra_host, collectives={"all-gather": curves})

    def seconds(size: int, num_bytes: float) -> float:
        whole = replace(cluster, devices_per_host=size, intra_host=link)
        return all_gather(LogicalMesh.of(whole, 1, size, (size,)), 0, num_bytes)

    share = log2(3 / 2)
    for num_bytes in (1e3, 5e3, 1e5, 1e6):
        assert seconds(2, num_bytes) == curves[2].seconds(num_bytes)
        assert seconds(3, num_bytes) == pytest.approx(
            (1 - share) * seconds(2, num_bytes) + share * seconds(4, num_bytes)
        )


def test_names():
    assert LogicalMesh.of(CLUSTER, 1, 8, (2, 4)).axis_names == ("axis0", "axis1")
    assert LogicalMesh.of(CLUSTER, 1, 8, (2, 4), ("data", "model")).axis_names == ("data", "model")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LogicalMesh.of(CLUSTER, 1, 8, (4, 4)), r"\(4, 4\) has 16 devices.* has 8"),
        (lambda: LogicalMesh.of(CLUSTER, 5, 8, (5, 8)), "5x8 does not fit into a cluster of 4x8"),
        (lambda: mesh(2, 0), r"at least 1, not \(2, 0\)"),
        (
            lambda: LogicalMesh(axis_names=("x",), sizes=(2, 2), links=()),
            "1 names, 2 sizes and 0 links",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_permute_is_one_message_of_each_device():
    ideal = LogicalMesh.of(Cluster.parse("v100-16gb:2x4,ideal"), 2, 4, (2, 4))
    fast, slow = (ideal.exchange_links[axis] for axis in (1, 0))
    assert collective_permute(ideal, (1,), 1e6) == fast.latency + 1e6 / fast.bandwidth
    assert collective_permute(ideal, (0, 1), 1e6) == slow.latency + 1e6 / slow.bandwidth
    cluster = Cluster.parse("h100:2x4")
    measured = LogicalMesh.of(cluster, 2, 4, (2, 4))
    inside, between = cluster.intra_host, cluster.inter_host
    assert collective_permute(measured, (1,), 1e6) == inside.latency + 1e6 / inside.bandwidth
    # All four devices of a host send over its network.
    across = between.latency + 4e6 / between.bandwidth
    assert collective_permute(measured, (0, 1), 1e6) == pytest.approx(across)


def test_combined_collectives_share_their_starts():
    alone = mesh(4, latency=1e-3)
    shared = replace(alone, combined=32)
    full = 12.0 * 2**20
    for collective, parts in ((all_gather, 1), (all_reduce, 1), (reduce_scatter, 4)):
        whole = collective(alone, 0, parts * full)
        assert collective(shared, 0, parts * full / 16) == pytest.approx(whole / 16)
        assert collective(shared, 0, 2 * parts * full) == collective(alone, 0, 2 * parts * full)
        few = collective(alone, 0, 32 * 1024.0) / 32  # the others are no larger
        assert collective(shared, 0, 1024.0) == pytest.approx(few)
    assert all_to_all(shared, 0, 1.0) == all_to_all(alone, 0, 1.0)
