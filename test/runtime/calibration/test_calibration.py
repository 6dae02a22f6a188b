"""`alpa-calibrate`: the figures that fit samples, and the cluster file made of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Cost, Link
from alpa.passes.cost.presets import PRESETS
from alpa.runtime.calibration.fit import fit, predicted
from alpa.runtime.calibration.measure import Sample, Sizes, measure
from alpa.runtime.calibration.text import cluster_text, comparison_text

SLOW = Link(bandwidth=1e9, latency=1e-4)
COLLECTIVES = {
    "all-reduce": {2: Cost(1e-5, 1e-9), 4: Cost(3e-5, 2e-9)},
    "all-gather": {4: Cost(2e-5, 1e-9)},
}


def sample(what: str, size: float, seconds: float) -> Sample:
    return Sample(what=what, size=size, seconds=seconds, spread=0.1)


def made() -> Iterator[Sample]:
    """Of a device of 1 TFLOP/s with f32, 2 with f16, and 100 GB/s, each half of it for little."""
    launch = 1e-6
    yield sample("launch", 1024.0, launch)
    for dtype, rate in (("f32", 1e12), ("f16", 2e12)):
        yield sample(f"matrix {dtype}", 1e8, launch + 1e8 / rate * 2)
        yield sample(f"matrix {dtype}", 1e10, launch + 1e10 / rate)
    yield sample("memory", 1e6, launch + 1e6 / 100e9 * 2)
    yield sample("memory", 1e8, launch + 1e8 / 100e9)
    for kind, sizes in COLLECTIVES.items():
        for size, cost in sizes.items():
            for num_bytes in (1e4, 1e6, 1e8):
                seconds = cost.start + cost.per_byte * num_bytes
                yield sample(f"{kind} {size}", num_bytes, seconds)
    for num_bytes in (1e4, 1e6, 1e8):
        yield sample("transfer", num_bytes, 5e-6 + num_bytes / 20e9)
    yield sample("overlap", 1e6, 0.25)


def test_what_is_exact_is_found_again() -> None:
    found = fit(made(), name="X", memory=2**30, inter_host=SLOW)
    device, link = found.machine.device, found.machine.intra_host
    assert device.peak_flops == pytest.approx({"f32": 1e12, "f16": 2e12})
    assert device.memory_bandwidth == pytest.approx(100e9)
    assert device.launch == 1e-6
    assert device.efficiency is not None
    assert device.efficiency.memory == (
        (1e6, pytest.approx(0.5)),
        (1e8, pytest.approx(1.0)),
    )
    for kind, sizes in COLLECTIVES.items():
        for size, cost in sizes.items():
            assert link.collectives[kind][size] == pytest.approx(cost)
    assert (link.latency, link.bandwidth) == (pytest.approx(5e-6), pytest.approx(20e9))
    assert link.overlap == 0.25
    assert found.machine.inter_host == SLOW
    assert found.spread == pytest.approx(0.1)
    assert max(found.residuals.values()) < 1e-6


def test_residuals_show_what_no_line_fits() -> None:
    times = {1e4: 1e-3, 1e6: 1e-5, 1e8: 1e-3}
    bent = [it for it in made() if it.what != "all-reduce 2"]
    bent += [sample("all-reduce 2", size, seconds) for size, seconds in times.items()]
    assert fit(bent, name="X", memory=1, inter_host=SLOW).residuals["all-reduce 2"] > 0.1


def test_matrices_and_memory_are_needed() -> None:
    with pytest.raises(ValueError, match="matrix products with f32 and memory traffic"):
        fit([sample("launch", 1.0, 1e-6)], name="X", memory=1, inter_host=SLOW)


def test_the_cluster_file_says_the_same(tmp_path: Path) -> None:
    found = fit(made(), name="X", memory=2**30, inter_host=SLOW)
    file = tmp_path / "cluster.toml"
    file.write_text(
        cluster_text(found, hosts=2, devices_per_host=4, about={"date": "now"}, comment="slow")
    )
    cluster = Cluster.parse(str(file))
    assert (cluster.hosts, cluster.devices_per_host) == (2, 4)
    assert cluster.device.memory == 2**30
    assert cluster.inter_host == SLOW
    machine = replace(found.machine, device=cluster.device, intra_host=cluster.intra_host)
    for each in made():
        assert predicted(machine, each) == pytest.approx(each.seconds, rel=2e-3)


def test_samples_beside_a_preset() -> None:
    lines = comparison_text([sample("all-reduce 8", 2.0**20, 1e-4)], PRESETS["h100"])
    cost = PRESETS["h100"].intra_host.collectives["all-reduce"][8]
    ratio = (cost.start + cost.per_byte * 2**20) / 1e-4
    assert lines[1].split()[-1] == f"{ratio:.2f}"


def test_every_kind_is_measured() -> None:
    sizes = Sizes(
        matrices=(16, 32), dtypes=("f32",), bytes=(2**12,), payloads=(2**12,), runs=2,
        seconds=0.0, longest=5,
    )  # fmt: skip
    samples = list(measure(jax.devices()[:4], sizes))
    kinds = {it.what for it in samples}
    collectives = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert kinds == {
        "matrix f32", "memory", "launch", "transfer", "overlap",
        *(f"{kind} {size}" for kind in collectives for size in (2, 4)),
    }  # fmt: skip
    assert all(it.seconds > 0 for it in samples if it.what != "overlap")
    assert [it.size for it in samples if it.what == "matrix f32"] == [2.0 * 16**3, 2.0 * 32**3]


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    command = [sys.executable, "-m", "alpa.tools.alpa_calibrate", "--quick", "--cpu-devices", "2"]
    run = subprocess.run(
        [*command, "-o", str(file), "--check", "cpu"], capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    assert run.stdout.startswith("what")
    cluster = Cluster.parse(str(file))
    assert cluster.num_devices == 2
    assert set(cluster.intra_host.collectives["all-reduce"]) == {2}
    assert cluster.device.efficiency is not None


def test_an_unknown_preset_is_refused() -> None:
    command = [sys.executable, "-m", "alpa.tools.alpa_calibrate", "--check", "h1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "alpa-calibrate: error: unknown cluster 'h1'" in run.stderr
