"""Differences of plans, from their PLAN.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from alpa import passes
from alpa.passes.plan.report import PlanReport
from alpa.runtime.questions.compare import ComparisonError, compare, read_numbers
from test.runtime.questions.test_hints import CHAIN

PROGRAM = """
func.func public @main(%x: tensor<64x64xf32> {alpa.role = "batch"}, %w: tensor<64x64xf32>,
    %v: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.dot_general %y, %v, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %z : tensor<64x64xf32>
}
"""


@pytest.fixture(scope="module")
def reports() -> list[PlanReport]:
    plans = ("num-stages=1", "num-stages=2")
    return [
        PlanReport.of(passes.run(PROGRAM, f"alpa{{cluster=cpu:1x4 num-layers=2 {options}}}"))
        for options in plans
    ]


def test_the_differences(reports: list[PlanReport]) -> None:
    first, second = (json.loads(it.to_json()) for it in reports)
    lines = str(compare(first, second, ("a", "b"))).splitlines()
    assert lines[0].split() == ["a", "b", "difference"]
    assert lines[1].split() == ["stages", "1", "2", "+1"]
    steps = [it.predicted_step_seconds for it in reports]
    more = f"{'+' if steps[1] > steps[0] else '-'}"
    assert lines[2].startswith("predicted step")
    assert more in lines[2].split()[-1]
    # The parts make up the whole difference.
    parts = [line for line in lines if re.match("  (slowest|fill|transfers)", line)]
    assert len(parts) == 3
    rows = [line.split()[:4] for line in lines if re.match(r"\s+\d  [ab]", line)]
    assert rows == [["0", "a", "0-1", "0-3"], ["0", "b", "0", "0-1"], ["1", "b", "1", "2-3"]]


def test_stages_that_share_meshes_are_counted(reports: list[PlanReport]) -> None:
    options = "cluster=cpu:2x2 num-layers=5 num-micro-batches=2 schedule=zb-v"
    shared = json.loads(PlanReport.of(passes.run(CHAIN, f"alpa{{{options}}}")).to_json())
    lines = str(compare(json.loads(reports[1].to_json()), shared, ("a", "b"))).splitlines()
    assert ["stages", "2", "4", "+2"] in [line.split() for line in lines]
    parts = [line for line in lines if line.startswith("  slowest mesh")]
    parts += [line for line in lines if line.startswith("  fill and drain, transfers and update")]
    assert len(parts) == 2
    rows = [line.split()[:2] for line in lines if re.match(r"\s+[\d,-]+  [ab]", line)]
    assert rows == [["0", "a"], ["0,3", "b"], ["1", "a"], ["1-2", "b"]]
    assert any(line.startswith("stages 0,3 of b: ") for line in lines)


def test_a_plan_and_itself(reports: list[PlanReport]) -> None:
    same = json.loads(reports[0].to_json())
    text = str(compare(same, same, ("a", "b")))
    assert text.endswith("the stages are the same\n")
    assert not re.search(r"[+-]\d", text)


def test_what_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ComparisonError, match="error: No such file"):
        read_numbers(path)
    path.write_text("plan")
    with pytest.raises(ComparisonError, match="error: not JSON"):
        read_numbers(path)
    for text in ("[]", '{"cluster": "cpu:1x4"}'):
        path.write_text(text)
        with pytest.raises(ComparisonError, match=r"no PLAN\.json, .*: it lacks '"):
            read_numbers(path)
