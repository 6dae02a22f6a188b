"""`alpa.tools.gpu_report`: its verdicts here, and its parts where there is a GPU."""

from __future__ import annotations

import operator
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.tools.gpu_report.__main__ import PartError, main, report, run_part
from alpa.tools.gpu_report.machine import Machine, machine
from alpa.tools.gpu_report.meshes import MeshesReport
from alpa.tools.gpu_report.report import Report
from alpa.tools.gpu_report.steps import MODELS, StepTimes, repeated

STEP = StepTimes(
    model=MODELS[0], plain=1.0, planned=1.02, predicted=1.1, predicted_bytes=19 << 30,
    bytes=20 << 30, losses=3, loss_error=1e-3, is_equal=True,
)  # fmt: skip
PAIR = MeshesReport(
    transport="jax", way="pigeon", comparison="2 of 2 results are equal\nnone differs",
    is_equal=True, is_restored=True, step=0.1, rate=2e9,
)  # fmt: skip
FINE = Report(
    machine=Machine(about={"device": "1 x H100", "cudnn": "91000"}, preset="h100"),
    calibration="what  size",
    cluster="cluster.toml",
    is_calibrated=True,
    steps=[STEP],
    meshes=[PAIR],
)


def test_a_report_without_misses() -> None:
    assert FINE.misses() == []
    text = FINE.markdown()
    assert "| cudnn | 91000 |" in text
    assert "## Calibration, beside the preset h100\n\n```\nwhat  size\n```" in text
    assert (
        "| gpt-350m | 4 | 1 s | 1.02 s | 1.020 | 1.1 s | 1.08 | 20 GiB | 19 GiB | 0.95 "
        "| 3: equal (1.0e-03) |" in text
    )
    assert "| jax | pigeon | 100 ms | 2.00 GB/s | equal | equal |" in text
    assert "* jax: 2 of 2 results are equal\n  none differs" in text
    assert text.endswith("## Verdict\n\nNothing differs, and no bar that counts is missed.\n")


@pytest.mark.parametrize(
    ("found", "miss"),
    [
        (replace(FINE, steps=[replace(STEP, planned=1.03)]), "gpt-350m: a step takes 1.030 times"),
        (
            replace(FINE, steps=[replace(STEP, predicted=0.9)]),
            "gpt-350m: predicted over measured is 0.88 (bar 0.9 to 1.1)",
        ),
        (
            replace(FINE, steps=[replace(STEP, bytes=25 << 30)]),
            "gpt-350m: predicted over measured memory is 0.76 (bar 0.9 to 1.1)",
        ),
        (
            replace(FINE, steps=[replace(STEP, is_equal=False)]),
            "gpt-350m: the losses differ from plain JAX's by 0.001",
        ),
        (replace(FINE, meshes=[replace(PAIR, is_equal=False)]), "two meshes, jax: 2 of 2"),
        (replace(FINE, meshes=[replace(PAIR, is_restored=False)]), "two meshes, jax: a rest"),
        (replace(FINE, steps=None, failures={"steps": "no memory"}), "steps: no memory"),
    ],
)
def test_what_misses_a_bar(found: Report, miss: str) -> None:
    (text,) = found.misses()
    assert text.startswith(miss)
    assert f"* {text.splitlines()[0]}" in found.markdown()


def test_seconds_that_say_nothing_do_not_count() -> None:
    slow = [replace(STEP, planned=2.0, predicted=9.0, bytes=None)]
    assert replace(FINE, steps=slow, judges_seconds=False).misses() == []
    # Without calibration, predictions do not count, but the ratio does.
    found = replace(FINE, steps=slow, is_calibrated=False)
    (miss,) = found.misses()
    assert "2.000 times" in miss
    assert "Predictions do not count: the device was not calibrated." in found.markdown()


def test_a_part_has_a_process_of_its_own() -> None:
    with pytest.raises(PartError, match="JAX finds no GPU, only CPU devices; install the plug-in"):
        run_part({"JAX_PLATFORMS": "cpu"}, machine, on_cpu=False)
    with pytest.raises(PartError, match=r"ended with status 1(.|\n)*KeyError: 'boom'"):
        run_part({}, operator.getitem, {}, "boom")


def test_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "none" / "report.md")]) == 1
    assert "gpu_report: error: there is no folder for" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_cpu(tmp_path: Path) -> None:
    """Half a minute of an idle machine per part."""
    output, cluster = tmp_path / "report.md", tmp_path / "cpu.toml"
    command = [sys.executable, "-m", "alpa.tools.gpu_report", "--devices", "cpu", "--quick"]
    command += ["--output", str(output), "--cluster-file", str(cluster)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == output.read_text()
    assert Cluster.parse(str(cluster)).num_devices == 1
    for part in ("matrix f32", "| gpt-tiny | 4 |", "| sockets | sockets, through host memory"):
        assert part in done.stdout


@pytest.mark.gpu
def test_training_on_one_gpu_equals_plain_jax(tmp_path: Path) -> None:
    found = report(["steps"], tmp_path / "gpu.toml", on_cpu=False, quick=True)
    assert not found.misses()
    assert found.steps is not None
    assert [it.model.program for it in found.steps] == ["gpt-tiny", "moe-tiny", "wresnet-tiny"]


@pytest.mark.gpu
def test_two_meshes_on_one_gpu(tmp_path: Path) -> None:
    """Results, transfers and a checkpoint."""
    found = report(["meshes"], tmp_path / "gpu.toml", on_cpu=False, quick=True)
    assert not found.misses()
    assert found.meshes is not None
    device, sockets = found.meshes
    assert device.way.startswith("jax.experimental.transfer, through pinned host memory")
    assert sockets.way.startswith("sockets")


@pytest.mark.gpu
def test_calibration_of_one_gpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.toml"
    found = report(["calibration"], file, on_cpu=False, quick=True)
    assert not found.misses()
    assert found.calibration is not None
    assert "matrix f32" in found.calibration
    cluster = Cluster.parse(str(file))
    assert cluster.num_devices == 1
    assert cluster.device.peak_flops["f32"] > 1e11


def test_losses_count_while_plain_jax_repeats_them() -> None:
    losses = [np.float32(it) for it in (3.0, 2.0, 1.0)]
    assert repeated(losses, losses) == losses
    assert repeated(losses, [losses[0], np.float32(2.5), losses[2]]) == losses[:1]
    assert repeated(losses, [np.float32(9.0), *losses[1:]]) == losses
