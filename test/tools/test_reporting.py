"""`alpa-plan --report`: the page of a file's plan, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alpa.tools.alpa_plan import main

STEP = """\
func.func public @main(
    %w: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
    loc("jit(step)/layer/dot_general"("model.py":12:5))
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %2 = stablehlo.subtract %w, %1 : tensor<16x16xf32>
  return %2 : tensor<16x16xf32>
}
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "step.mlir"
    path.write_text(STEP)
    return [str(path), "--cluster", "cpu:1x2", "--num-micro-batches", "2"]


def test_the_page_of_a_file(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, plan = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main([*command, "--report", str(page), "--json", str(plan)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    numbers, text = json.loads(plan.read_text()), page.read_text()
    assert f"Plan of {command[0]} for cpu:1x2" in text
    assert "layer/dot_general" in text
    assert "model.py:12:5" in text
    (step, *_) = re.findall(r'value="(\S+)" data-entry="predicted_step_seconds"', text)
    assert float(step) == numbers["predicted_step_seconds"]
    (peak, *_) = re.findall(r'value="(\d+)" data-entry="predicted_peak_bytes.0"', text)
    assert [int(peak)] == numbers["predicted_peak_bytes"]
    phases = re.findall(r'value="(\S+)" data-entry="phases.([\w-]+)"', text)
    assert {name: float(seconds) for seconds, name in phases} == numbers["phases"]


def test_its_folder_must_exist(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--report", "/nowhere/plan.html"]) == 1
    assert "cannot write /nowhere/plan.html: there is no folder" in capsys.readouterr().err


def test_a_trace_needs_a_report(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--trace", "step.json"]) == 1
    assert "--trace is for --report; add it, or remove --trace" in capsys.readouterr().err


def test_a_trace_must_be_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "step.json"
    command += ["--report", str(page), "--trace", str(trace)]
    assert main(command) == 1
    assert f"there is no trace {trace}" in capsys.readouterr().err
    trace.write_text("{}")
    assert main(command) == 1
    assert f"{trace} is not the trace of a step" in capsys.readouterr().err
    assert not page.exists()
