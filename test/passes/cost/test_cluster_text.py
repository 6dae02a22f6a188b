"""A cluster that is written as a file is read as the same cluster."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.cluster_text import cluster_text
from alpa.passes.cost.device import Call, Cost, Curve, Efficiency, Transfer
from alpa.passes.cost.equation import Equation
from alpa.passes.cost.presets import IDEAL, PRESETS


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Each number and text inside of a cluster's fields, by its path."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        return {path: value}
    found: dict[str, Any] = {f"{path} length": len(inner)}
    for key, it in inner:
        found |= flat(it, f"{path}.{key}")
    return found


def check_same(one: Cluster, other: Cluster) -> None:
    # Bandwidths of collectives are inverted twice, so their last digit may differ.
    expected = {
        path: pytest.approx(it, rel=1e-12, abs=0.0) if isinstance(it, float) else it
        for path, it in flat(asdict(other)).items()
    }
    assert flat(asdict(one)) == expected


def read_back(cluster: Cluster, folder: Path) -> Cluster:
    file = folder / "cluster.toml"
    file.write_text(cluster_text(cluster))
    return Cluster.parse(str(file))


@pytest.mark.parametrize(
    "name", [f"{it}:2x4" for it in PRESETS] + [f"{it}:2x4,ideal" for it in IDEAL]
)
def test_presets(name: str, tmp_path: Path) -> None:
    cluster = Cluster.parse(name)
    check_same(read_back(cluster, tmp_path), cluster)


def test_a_small_memory(tmp_path: Path) -> None:
    cluster = Cluster.parse("cpu:2x2,memory=500KiB")
    check_same(read_back(cluster, tmp_path), cluster)


def test_everything_that_a_file_may_say(tmp_path: Path) -> None:
    known = Cluster.parse("h100:2x8")
    efficiency = Efficiency(
        matrix={"f32": ((1e3, 0.1), (1234567.5, 0.123456789))},
        memory=((1.0, 0.5),),
        convolution={"f32": ((1e3, 0.1),), "complex<f32>": ((1e3, 0.2),)},
        elementwise=((2.0, 0.25),),
    )
    device = replace(
        known.device,
        name='my "device" \\ ü',
        efficiency=efficiency,
        peak_flops={"f32": 1 / 3, "complex<f32>": 1e12},
        launch=1.25e-6,
        call=Call(1e-6, 2e-7, 3e-8),
        step=Call(5e-6),
        alone=((1.0, 0.5), (4.0, 1.0)),
    )
    link = replace(
        known.inter_host,
        overlap=0.125,
        transfer_overlap=0.25,
        transfer=Transfer(1e9, 1e-5),
        collectives={
            "all-reduce": {2: Cost(1e-5, 1e-11), 4: Curve(((1.0, 1e-5), (1e6, 1e-3)))},
        },
    )
    cluster = replace(known, device=device, intra_host=link, inter_host=link)
    check_same(read_back(cluster, tmp_path), cluster)
    assert "\n# why\n[inter_host]\n" in cluster_text(cluster, comment="why")


def test_an_equation_is_not_in_a_file() -> None:
    cluster = replace(Cluster.parse("cpu:1x1"), equation=Equation(gamma=1.0, epsilon={}))
    with pytest.raises(ValueError, match="a cluster file has no equation"):
        cluster_text(cluster)
