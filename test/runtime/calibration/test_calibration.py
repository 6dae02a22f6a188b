"""`alpa-calibrate`: the figures that fit samples, and the cluster file made of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Call, Collectives, Curve, Link
from alpa.passes.cost.presets import PRESETS
from alpa.runtime.ahead_of_time.compilation import without_notices
from alpa.runtime.calibration.fit import fit, predicted
from alpa.runtime.calibration.measure import BYTES_PER_OP, Bench, Sample, Sizes, measure
from alpa.runtime.calibration.text import calibrated_text, comparison_text

SLOW = Link(bandwidth=1e9, latency=1e-4)
COLLECTIVES: Collectives = {
    "all-reduce": {
        2: Curve(((1e4, 2e-5), (1e6, 1.1e-3), (1e8, 0.5))),
        4: Curve(((1e4, 5e-5), (1e6, 2e-3))),
    },
    "all-gather": {4: Curve(((1e4, 3e-5), (1e6, 1e-3)))},
}
CALL = Call(1e-4, 2e-6, 5e-7)


def sample(what: str, size: float, seconds: float) -> Sample:
    return Sample(what=what, size=size, seconds=seconds, spread=0.1)


def made() -> Iterator[Sample]:
    """Of a device of 1 TFLOP/s with f32, 2 with f16, and 100 GB/s, each half of it for little.

    Convolutions reach a quarter, element-wise ops 1 and 2 %.
    """
    launch = 1e-6
    yield sample("launch", 1024.0, launch)
    for dtype, rate in (("f32", 1e12), ("f16", 2e12)):
        yield sample(f"matrix {dtype}", 1e8, launch + 1e8 / rate * 2)
        yield sample(f"matrix {dtype}", 1e10, launch + 1e10 / rate)
        yield sample(f"convolution {dtype}", 1e9, launch + 1e9 / rate * 4)
    yield sample("elementwise", 1e6, launch + 1e6 / 1e12 * 100)
    yield sample("elementwise", 1e8, launch + 1e8 / 1e12 * 50)
    for devices in (1, 2, 4):
        for number in (16, 256):
            seconds = CALL.start + CALL.seconds(4.0 * number, devices) + number * launch
            yield sample(f"call {devices}", 4.0 * number, seconds)
    yield sample("memory", 1e6, launch + 1e6 / 100e9 * 2)
    yield sample("memory", 1e8, launch + 1e8 / 100e9)
    for kind, sizes in COLLECTIVES.items():
        for size, cost in sizes.items():
            assert isinstance(cost, Curve)
            for num_bytes, seconds in cost.points:
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
    assert device.efficiency.convolution["f16"] == ((1e9, pytest.approx(0.25)),)
    assert device.efficiency.elementwise == (
        (1e6, pytest.approx(0.01)),
        (1e8, pytest.approx(0.02)),
    )
    assert device.call == pytest.approx(CALL)
    for kind, sizes in COLLECTIVES.items():
        for size, cost in sizes.items():
            assert link.collectives[kind][size] == cost
    assert link.transfer == (pytest.approx(20e9), pytest.approx(5e-6))
    # Four devices gather 1 MB in 1 ms, three steps of a quarter each.
    step = link.latency + 1e6 / 4 / link.bandwidth
    assert 3 * step == pytest.approx(1e-3, rel=1e-6)
    assert link.overlap == 0.25
    assert found.machine.inter_host == SLOW
    assert found.spread == pytest.approx(0.1)
    assert max(found.residuals.values()) < 1e-6


def test_elementwise_ops_of_which_memory_takes_most() -> None:
    """Where memory takes half of the time or more, the ops take the rest."""
    slow = sample("elementwise", 1e9, 1.5 * 1e9 * BYTES_PER_OP / 100e9)
    device = fit([*made(), slow], name="X", memory=1, inter_host=SLOW).machine.device
    assert device.efficiency is not None
    rest = slow.seconds / 3
    assert device.efficiency.elementwise[-1] == (
        1e9,
        pytest.approx(1e9 / (rest - device.launch) / 1e12),
    )


def test_samples_of_one_size_are_averaged() -> None:
    """A batch of small products takes four times as long as one of as many FLOPs."""
    batch = sample("matrix f32", 1e10, 1e-6 + 4 * 1e10 / 1e12)
    found = fit([*made(), batch], name="X", memory=1, inter_host=SLOW)
    assert found.machine.device.peak_flops["f32"] == pytest.approx(0.5e12, rel=1e-3)
    assert found.residuals["matrix f32"] == pytest.approx((0 + 1 + 0.5) / 3, rel=1e-2)


def test_without_them_calls_take_no_time() -> None:
    few = (it for it in made() if it.what.split()[0] in ("matrix", "memory"))
    device = fit(few, name="X", memory=1, inter_host=SLOW).machine.device
    assert device.call == Call()
    assert device.efficiency is not None
    assert not device.efficiency.elementwise
    assert not device.efficiency.convolution


def test_moves_that_take_as_long_for_any_bytes() -> None:
    few = [it for it in made() if it.what.split()[0] in ("matrix", "memory")]
    moves = [sample("transfer", num_bytes, 1.6e-4) for num_bytes in (1e4, 1e5)]
    found = fit([*few, *moves], name="X", memory=1, inter_host=SLOW)
    link = found.machine.intra_host
    assert link.transfer == (pytest.approx(100e9, rel=1e-2), pytest.approx(1.6e-4, rel=1e-2))
    assert link.latency == link.transfer.latency
    assert found.residuals["transfer"] < 0.01


@pytest.mark.parametrize(("count", "groups"), [(1, set()), (3, {3}), (6, {2, 3, 6})])
def test_collectives_of_each_part_of_the_devices_are_measured(
    count: int, groups: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "chain", lambda *_, **__: (1.0, 0.0))
    sizes = Sizes(
        matrices=(16,), dtypes=("f32",), images=(4,), elements=(2**8,), bytes=(2**12,),
        payloads=(2**12,), arguments=(2,), runs=2,
    )  # fmt: skip
    samples = measure(jax.devices()[:count], sizes)
    kinds = [it.what.split() for it in samples if "-" in it.what]
    assert {int(size) for _, size in kinds} == groups
    assert len(kinds) == 4 * len(groups)


def test_residuals_show_where_more_bytes_take_less() -> None:
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
        calibrated_text(found, hosts=2, devices_per_host=4, about={"date": "now"}, comment="slow")
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
    ratio = cost.seconds(2.0**20) / 1e-4
    assert lines[1].split()[-1] == f"{ratio:.2f}"


@pytest.mark.slow
def test_every_kind_is_measured() -> None:
    sizes = Sizes(
        matrices=(16, 64), dtypes=("f32",), images=(4,), elements=(2**8,), bytes=(2**12,),
        payloads=(2**12,), arguments=(2, 4), runs=2, seconds=0.0, longest=5,
    )  # fmt: skip
    samples = list(measure(jax.devices()[:4], sizes))
    kinds = {it.what for it in samples}
    collectives = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all"}
    assert kinds == {
        "matrix f32", "convolution f32", "elementwise", "memory", "launch", "transfer", "overlap",
        "call 1", "call 2", "call 4",
        *(f"{kind} {size}" for kind in collectives for size in (2, 4)),
    }  # fmt: skip
    assert all(it.seconds > 0 for it in samples if it.what != "overlap")
    assert [it.size for it in samples if it.what == "matrix f32"] == [
        2.0 * 16**3,
        2.0 * 64**3,
        2.0 * 64**3,
    ]
    assert [it.size for it in samples if it.what == "call 4"] == [8.0, 16.0]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_numbers_stay_ordinary_in_long_chains(dtype: str) -> None:
    """On zeros, infinities and NaNs, GPUs would run faster."""
    ends: list[np.ndarray] = []

    class Kept(Bench):
        """Keeps what chains end with."""

        def chain(self, body: Callable[[Any], Any], start: Any, **_: Any) -> tuple[float, float]:
            for _ in range(32):
                start = body(start)
            ends.append(np.asarray(start[0], np.float32))
            return 1.0, 0.0

    bench = Kept(jax.devices()[:1], Sizes())
    list(bench.matrix(dtype, 64))
    bench.convolution(dtype, 8)
    assert len(ends) == 3
    for end in ends:
        assert np.isfinite(end).all()
        assert 1e-4 < end.std() < 1e3


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    command = [sys.executable, "-m", "alpa.tools.alpa_calibrate", "--quick", "--cpu-devices", "2"]
    run = subprocess.run(
        [*command, "-o", str(file), "--check", "cpu"], capture_output=True, text=True, check=True
    )
    assert without_notices(run.stderr) == []
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
