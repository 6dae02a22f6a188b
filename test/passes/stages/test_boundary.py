from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.solve.transfers import cross_mesh
from alpa.passes.solve.transfers.tiles import TiledMesh
from alpa.passes.stages.boundary import Boundary


def boundary_of(size: float) -> Boundary:
    """Two layers; the values that cross have so many bytes, 2 of them forward and 1 back."""
    return Boundary(
        bytes=np.array([[0.0, 2 * size], [0.0, size]]),
        values=np.array([[0.0, 2.0], [0.0, 1.0]]),
        once=np.array([[[0.0, 3 * size], [size, 0.0]], [[0.0, 1.0], [1.0, 0.0]]]),
    )


@pytest.mark.parametrize(
    "name", ["h100:4x8", "h100:4x8,ideal", "v100-16gb:4x8", "a100-40gb:4x4", "cpu:4x4"]
)
@pytest.mark.parametrize(("hosts", "apart"), [(1, 0), (1, 1), (2, 2)])
def test_tensors_take_what_the_plan_says_of_them(name: str, hosts: int, apart: int) -> None:
    """A tensor that is split alike on both meshes, in the same host or `apart` hosts further."""
    cluster = Cluster.parse(name)
    devices = cluster.devices_per_host // (1 if apart else 2)
    count = hosts * devices
    first = apart * cluster.devices_per_host or devices
    source, target = (
        TiledMesh.of(cluster, tuple(range(start, start + count)), (count,), ((0,), ()))
        for start in (0, first)
    )
    problem = cross_mesh.Problem(
        shape=(64 * count, 1024),
        itemsize=4,
        source=source,
        target=target,
        slow=cluster.inter_host,
        fast=cluster.intra_host,
    )
    size = 64 * count * 1024 * 4
    found = boundary_of(size).seconds(cluster, hosts=hosts, devices=devices)
    way = 1 if apart else 0
    assert found[1, 1, way] == pytest.approx(cross_mesh.solve(problem).transfers.seconds)
    assert found[0, 1, way] == pytest.approx(2 * found[1, 1, way])
    assert not found[:, 0].any()


def test_transfers_of_updates() -> None:
    cluster, boundary = Cluster.parse("h100:2x8"), boundary_of(1e6)
    port, latency = cluster.intra_host.between_meshes, cluster.inter_host.between_meshes.latency
    once = boundary.once_seconds(cluster, hosts=2, devices=8)
    assert once[1, 1] == pytest.approx(3e6 / (16 * port.bandwidth) + latency)
    assert once[0, 1] == 0.0
    # Stages of one mesh read one another's values where they are.
    between = boundary.once_between(range(1, 2), range(1), cluster, hosts=2, devices=8)
    assert between == once[0, 0] == pytest.approx(1e6 / (16 * port.bandwidth) + latency)
