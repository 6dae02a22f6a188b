"""`search_times`: the search of each program in a fresh process, by phases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.tools import search_times, zoo
from alpa.tools.search_times import (
    CASES,
    PHASES,
    Case,
    SearchError,
    Times,
    main,
    measure,
)

PAPERS = [name for name in CASES if name.startswith(("gpt-", "moe-", "wresnet-"))]
TINY = Case(program="gpt-tiny", cluster="cpu:1x1", micro_batch_size=4, num_micro_batches=2)

STEP = """\
func.func public @main(
    %w: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}) {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %n = stablehlo.subtract %w, %g : tensor<16x16xf32>
  return %n : tensor<16x16xf32>
}
"""


def times(seconds: float, size: int) -> Times:
    phases = dict.fromkeys(PHASES, seconds)
    return Times(phases=phases, total=10 * seconds, peak_bytes=size, step_seconds=2 * seconds)


def test_the_papers_models_have_the_papers_gpus() -> None:
    clusters = [Cluster.parse(CASES[name].cluster) for name in PAPERS]
    assert [cluster.num_devices for cluster in clusters] == 3 * [1, 4, 8, 16, 32, 64]
    assert {cluster.device.name for cluster in clusters} == {"V100-SXM2-16GB"}


def test_the_cases_are_of_the_zoo() -> None:
    assert set(CASES) - set(PAPERS) == {"llama-8b"}
    assert set(CASES) <= set(zoo.names())
    assert all(name == case.program for name, case in CASES.items())
    for name, case in CASES.items():
        batch = case.micro_batch_size * case.num_micro_batches
        assert batch == zoo.get(name).global_batch_size


def check_search(found: Times) -> None:
    assert tuple(found.phases) == PHASES  # so nothing is lowered
    assert found.total == pytest.approx(sum(found.phases.values()))
    assert found.step_seconds > 0
    assert 2**26 < found.peak_bytes < 2**32  # Python and jaxlib are some hundred MiB


def test_a_search_in_a_process_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "step.mlir"
    file.write_text(STEP)
    # In a process as small as the tool's own: a parent's memory counts for its children.
    script = (
        "import dataclasses, json\nfrom pathlib import Path\n"
        "from alpa.tools.search_times import Case, measure_file\n"
        f"times = measure_file(Path({str(file)!r}), {TINY!r}, schedule='1f1b')\n"
        "print(json.dumps(dataclasses.asdict(times)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_search(Times(**json.loads(done.stdout)))


@pytest.mark.slow
def test_each_run_is_a_search() -> None:
    found = measure(TINY, runs=2, schedule="1f1b")
    assert len(found) == 2
    for one in found:
        check_search(one)


def test_what_cannot_be_lowered_says_why() -> None:
    with pytest.raises(SearchError, match="no-model"):
        measure(replace(TINY, program="no-model"), runs=1, schedule="1f1b")


def test_medians_are_taken_number_by_number() -> None:
    assert Times.median([times(1, 30), times(5, 10), times(2, 20)]) == times(2, 20)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, int, str]]:
    """The rows that were requested; all but gpt-39b have made-up numbers."""
    asked: list[tuple[Case, int, str]] = []

    def answer(case: Case, *, runs: int, schedule: str) -> list[Times]:
        asked.append((case, runs, schedule))
        if case.program == "gpt-39b":
            raise SearchError("step.mlir:1:1: error: it is too large")
        return [times(n, n << 20) for n in range(1, runs + 1)]

    monkeypatch.setattr(search_times, "measure", answer)
    return asked


def test_prints_medians_and_writes_all_runs(
    measured: list[tuple[Case, int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    command = ["gpt-2.6b", "--runs", "3", "--num-micro-batches", "64", "--json", str(path)]
    assert main(command) == 0
    header, rule, row = (
        line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()
    )
    cells = dict(zip(header, row, strict=True))
    assert len(rule) == len(header)
    assert cells["model"] == "gpt-2.6b"
    assert cells["micro-batches"] == "64 of 8"
    assert cells["stage-mesh-partition"] == "2 s"
    assert (cells["total"], cells["peak memory"], cells["step"]) == ("20 s", "2 MiB", "4 s")
    ((case, runs, schedule),) = measured
    assert (case.num_micro_batches, runs, schedule) == (64, 3, "1f1b")
    (written,) = json.loads(path.read_text())
    assert written["cluster"] == "v100-16gb:1x8,ideal"
    assert [run["total"] for run in written["runs"]] == [10, 20, 30]


def test_what_cannot_be_planned_does_not_end_the_table(
    measured: list[tuple[Case, int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpt-39b", "moe-70b"]) == 1
    captured = capsys.readouterr()
    rows = captured.out.splitlines()[2:]
    assert rows[0] == "| gpt-39b | v100-16gb:8x8,ideal | 128 of 8 | not possible |"
    assert rows[1].startswith("| moe-70b | v100-16gb:8x8,ideal | 128 of 8 | 1 s |")
    assert captured.err == "gpt-39b: step.mlir:1:1: error: it is too large\n"


def test_wrong_arguments_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-2.7b"]) == 1
    assert "no model gpt-2.7b; there are gpt-350m, " in capsys.readouterr().err
    assert main(["gpt-2.6b", "--json", os.path.join("no", "such", "folder")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m alpa.tools.search_times gpt-350m" in capsys.readouterr().out
