"""`measured_steps`: predicted steps beside those that Alpa's authors measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from math import prod
from pathlib import Path
from statistics import median

import jax
import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.tools.measured_steps import (
    MEASURED,
    RANKED,
    Step,
    fastest,
    from_gpu_to_gpu,
    main,
    predict,
)
from alpa.tools.search_times import CASES, SearchError
from alpa.tools.steps_here import CaseHere, StepHere


def test_the_models_are_planned_for_the_paper_s_gpus() -> None:
    assert set(MEASURED) <= set(CASES)
    assert set(RANKED) <= set(MEASURED)


def test_a_ratio_is_predicted_over_measured() -> None:
    step = Step(program="x", cluster="y", measured=10.0, predicted=9.0, fastest=9.0, restricted={})
    assert step.ratio == pytest.approx(0.9)


def test_restricted_searches_get_the_authors_restrictions() -> None:
    for name, ranked in RANKED.items():
        for kind, one in ranked.items():
            shape = one.options[one.options.index("--mesh-shape") + 1]
            cluster = Cluster.parse(CASES[name].cluster)
            devices = cluster.num_devices if kind == "intra-only" else 1
            assert prod(map(int, shape.split("x"))) == devices


def test_the_authors_sent_from_gpu_to_gpu(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(from_gpu_to_gpu("v100-16gb:2x8"), encoding="utf-8")
    found, preset = Cluster.parse(str(file)), Cluster.parse("v100-16gb:2x8")
    assert found.device.memory == preset.device.memory
    assert found.intra_host.between_meshes.bandwidth == 20e9
    assert found.inter_host.between_meshes.bandwidth == preset.inter_host.bandwidth
    groups, expected = found.intra_host.collectives, preset.intra_host.collectives
    assert {kind: set(it) for kind, it in groups.items()} == {
        k: set(it) for k, it in expected.items()
    }
    assert preset.intra_host.between_meshes.bandwidth < 20e9


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-3"]) == 1
    assert capsys.readouterr().err.startswith("error: no model gpt-3; there are gpt-350m")


def test_micro_batches_divide_the_batch() -> None:
    for name, one in MEASURED.items():
        batch = CASES[name].micro_batch_size * CASES[name].num_micro_batches
        every = [one, *RANKED.get(name, {}).values()]
        assert all(batch % number == 0 for it in every for number in it.micro_batches)


def test_a_step_here_as_cells() -> None:
    step = StepHere(
        case=CaseHere(program="gpt-tiny", num_stages=2, num_micro_batches=4),
        meshes=("2", "2"),
        measured=0.02,
        spread=0.05,
        fastest=0.018,
        predicted=0.015,
        at_once=0.01,
    )
    assert step.ratio == pytest.approx(0.75)
    cells = ["gpt-tiny", "2, 2", "4", "20 ms", "5%", "18 ms", "15 ms", "0.75", "10 ms"]
    assert step.cells() == cells
    assert replace(step, meshes=("4",)).cells()[-1] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--here", "cpu:1x2", "gpt-3"], "error: no model gpt-3; there are gpt-350m"),
        (["--here", "none.toml", "gpt-tiny"], "error: cannot read the cluster file 'none.toml'"),
        (["--here", "cpu:1x2000", "gpt-tiny"], "error: the cluster has 2000 devices"),
    ],
)
def test_what_cannot_run_here_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jax.devices()  # they can no longer become more
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.slow
def test_steps_here_are_near_what_calibration_predicts(tmp_path: Path) -> None:
    """Of the fastest steps: other work makes most steps longer than calibration sees."""
    cluster, file = tmp_path / "cpu.toml", tmp_path / "steps.json"
    calibrate = ["alpa.tools.alpa_calibrate", "--cpu-devices", "4", "-o", str(cluster)]
    measure = ["alpa.tools.measured_steps", "--here", str(cluster), "--json", str(file)]
    for command in (calibrate, [*measure, "gpt-tiny", "t5-tiny", "wresnet-tiny"]):
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    ratios = [step["predicted"] / step["fastest"] for step in json.loads(file.read_text())]
    assert len(ratios) == 3
    assert 1 / 3 < median(ratios) < 3


@pytest.mark.slow
def test_what_fits_with_no_number_of_micro_batches_is_an_error() -> None:
    with pytest.raises(SearchError, match=r"1 micro-batches: .*; 2 micro-batches: "):
        fastest("moe-380m", (1, 2), [])


@pytest.mark.slow
@pytest.mark.parametrize("program", list(MEASURED))
def test_predictions_are_near_what_was_measured(program: str) -> None:
    assert predict(program).ratio == pytest.approx(1, abs=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--inter", "none"], ["--intra", "none"]])
def test_restricted_searches_are_not_predicted_faster(options: list[str]) -> None:
    assert fastest("gpt-1.3b", (128,), options) >= 0.999 * fastest("gpt-1.3b", (128,), [])


@pytest.mark.slow
@pytest.mark.parametrize("program", ["gpt-1.3b", "gpt-6.7b", "moe-1.3b", "moe-2.4b", "wresnet-4b"])
def test_restricted_searches_are_ranked_as_measured(program: str, tmp_path: Path) -> None:
    """Where measured steps differ by more than 5 %."""
    file = tmp_path / "steps.json"
    assert main([program, "--ranking", "--json", str(file)]) == 0
    (step,) = json.loads(file.read_text())
    measured = {name: one.value for name, one in RANKED[program].items()} | {"whole": 1.0}
    predicted = step["restricted"] | {"whole": step["fastest"]}
    assert set(measured) == set(predicted)
    for a, b in permutations(measured, 2):
        if measured[a] > 1.05 * measured[b]:
            assert predicted[a] > predicted[b]
