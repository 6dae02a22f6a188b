from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster, Link
from alpa.passes.cost.collectives import (
    LogicalMesh,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)

CLUSTER = Cluster.parse("v100-16gb:4x8")
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
    view = LogicalMesh.of(Cluster.parse("v100-16gb:2x8"), 2, 8, (16,))
    assert all_to_all(view, 0, 1e9) == pytest.approx(15 * 20e-6 + 8 * 0.5e9 / SLOW)


def test_all_to_all_between_hosts_equals_the_ring():
    view = LogicalMesh.of(CLUSTER, 4, 8, (4, 8))
    assert view.exchange_links[0].bandwidth == pytest.approx(view.links[0].bandwidth)


def test_names():
    assert LogicalMesh.of(CLUSTER, 1, 8, (2, 4)).axis_names == ("x", "y")
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
