from __future__ import annotations

import pytest

from alpa.passes.base import OptionError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.stages.given_meshes import meshes_text, parse_meshes

CLUSTER = Cluster.parse("cpu:2x4")


def test_meshes_are_read_and_written() -> None:
    text = "4-7:2x2,0-1:2,2-2:1,3-3:1"
    meshes = parse_meshes(text, CLUSTER)
    assert meshes_text(meshes) == text
    assert [(it.name, it.hosts, it.devices, it.logical_shape) for it in meshes[:2]] == [
        ("mesh_0", (1,), (4, 5, 6, 7), (2, 2)),
        ("mesh_1", (0,), (0, 1), (2,)),
    ]
    (whole,) = parse_meshes("0-7:4x2", CLUSTER)
    assert whole.hosts == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2x2", "holds '2x2'; expected the first and last device"),
        ("0-8:9", "the cluster's devices are 0-7"),
        ("3-0:4", "the cluster's devices are 0-7"),
        ("0-3:2", "a shape of 2 for 4 devices"),
        ("0-3:4,3-3:1", "gives device 3 to two meshes"),
        ("2-5:4", "a mesh is a part of one host or whole hosts of 4"),
    ],
)
def test_wrong_meshes_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_meshes(text, CLUSTER)
