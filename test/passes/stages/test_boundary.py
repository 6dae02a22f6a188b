from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.stages.boundary import Boundary


def test_transfers_take_what_the_runtime_s_way_takes() -> None:
    cluster = Cluster.parse("h100:2x8")
    boundary = Boundary(
        bytes=np.array([[0.0, 8e6], [0.0, 4e6]]),
        values=np.array([[0.0, 2.0], [0.0, 1.0]]),
        once=np.array([[[0.0, 3e6], [1e6, 0.0]], [[0.0, 1.0], [1.0, 0.0]]]),
    )
    near, far = cluster.intra_host.between_meshes, cluster.inter_host.between_meshes
    assert near != (cluster.intra_host.bandwidth, cluster.intra_host.latency)
    found = boundary.seconds(cluster, hosts=1, devices=4)
    assert found[0, 1, 0] == pytest.approx(8e6 / (4 * near.bandwidth) + 2 * near.latency)
    assert found[1, 1, 1] == pytest.approx(4e6 / far.bandwidth + far.latency)
    once = boundary.once_seconds(cluster, hosts=2, devices=8)
    assert once[1, 1] == pytest.approx(3e6 / (2 * far.bandwidth) + far.latency)
    assert once[0, 1] == 0.0
    # Stages of one mesh read one another's values where they are.
    between = boundary.once_between(range(1, 2), range(1), cluster, hosts=2, devices=8)
    assert between == once[0, 0] == pytest.approx(1e6 / (2 * far.bandwidth) + far.latency)
