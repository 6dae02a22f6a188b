"""Hints: a plan's decisions written down give the plan again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from alpa.dialects import main_function, parse
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.runtime.choices import read_hints
from alpa.runtime.planning import Settings, plan
from alpa.runtime.questions.hints import hints

PROGRAM = """
func.func public @main(
    %x: tensor<64x64xf32> {alpa.role = "batch"} loc("x"), %w: tensor<64x64xf32> loc("w"),
    %v: tensor<64x64xf32> loc("v"), %other: tensor<64xf32> loc("v")) -> tensor<64x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.dot_general %y, %v, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %z : tensor<64x64xf32>
}
"""
CHAIN = """
func.func public @main(%x: tensor<64x64xf32>
    {alpa.role = "batch", alpa.batch_dim = 0 : i64} loc("x"),
    %w: tensor<64x64xf32> {alpa.role = "constant"} loc("w"))
    -> (tensor<64x64xf32> {alpa.result = "concat:0"}) {
  %a = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %b = stablehlo.dot_general %a, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %c = stablehlo.dot_general %b, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %d = stablehlo.dot_general %c, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %e = stablehlo.dot_general %d, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %e : tensor<64x64xf32>
}
"""
SHARDED = """
sdy.mesh @m = <["a"=2, "b"=2]>
func.func public @main(
    %x: tensor<64x32xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}, {}]>} loc("x"),
    %w: tensor<32x32xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {"b"}]>} loc("w"))
    -> tensor<64x32xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  %z = stablehlo.dot_general %y, %w, contracting_dims = [1] x [0]
    : (tensor<64x32xf32>, tensor<32x32xf32>) -> tensor<64x32xf32>
  return %z : tensor<64x32xf32>
}
"""
OWN = "0F0,0F1,3F0,3F1;1F0,2F0,1F1,2F1"


def test_the_plan_again(tmp_path: Path) -> None:
    program, path = parse(PROGRAM), tmp_path / "hints"
    settings = Settings(cluster="cpu:1x4", num_layers=2, num_stages=2)
    first = plan(program, settings, Clock())
    path.write_text(hints(first.module, program))
    given = read_hints(path)
    assert [text for text in given if text.startswith("layer")] == [
        "layer 0 on 1x2 as 2",
        "layer 1 on 1x2 as 2",
    ]
    # Two arguments are called v, so these have their numbers.
    names = [text.partition(" ")[0] for text in given if not text.startswith("layer")]
    assert names == ["x", "w", "2", "3"]
    forced = Settings(cluster="cpu:1x4", num_layers=2, force=given)
    second = plan(program, forced, Clock())
    assert second.plan.predicted_step_seconds == first.plan.predicted_step_seconds
    shardings = [
        [MeshTensor.from_type(it.type) for it in main_function(planned.module).arguments]
        for planned in (first, second)
    ]
    assert shardings[0] == shardings[1]


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (Settings(cluster="cpu:1x4", num_layers=2), ["layers 0-1 on 1x4 as 2x2"]),
        (
            Settings(cluster="cpu:2x4", num_layers=2, num_stages=2),
            ["layer 0 on 1x4 as 2x2", "layer 1 on 1x4 as 2x2"],
        ),
    ],
)
def test_a_plan_on_the_mesh_of_the_program_again(
    settings: Settings, stages: list[str], tmp_path: Path
) -> None:
    program, path = parse(SHARDED), tmp_path / "hints"
    first = plan(program, settings, Clock())
    path.write_text(hints(first.module, program))
    given = read_hints(path)
    assert [text for text in given if text.startswith("layer")] == stages
    second = plan(program, replace(settings, force=given), Clock())
    assert second.plan.predicted_step_seconds == first.plan.predicted_step_seconds
    assert PlanReport.of(second.module).meshes == PlanReport.of(first.module).meshes


@pytest.mark.parametrize(
    ("schedule", "hint", "again"), [("zb-v", ["schedule = zb-v"], "auto"), (OWN, [], OWN)]
)
def test_a_plan_with_several_stages_on_each_mesh_again(
    schedule: str, hint: list[str], again: str, tmp_path: Path
) -> None:
    program, path = parse(CHAIN), tmp_path / "hints"
    settings = Settings(cluster="cpu:2x2", num_layers=5, num_micro_batches=2, schedule=schedule)
    first = plan(program, settings, Clock())
    report = PlanReport.of(first.module)
    assert [stage.numbers for stage in report.stages] == [(0, 3), (1, 2)]
    path.write_text(hints(first.module, program))
    given = read_hints(path)
    assert [text for text in given if "[" not in text] == hint
    second = plan(program, replace(settings, schedule=again, force=given), Clock())
    found = PlanReport.of(second.module)
    assert (found.schedule, found.meshes, found.stages) == (
        report.schedule,
        report.meshes,
        report.stages,
    )
    assert found.predicted_step_seconds == report.predicted_step_seconds


def test_a_schedule_that_is_given_twice() -> None:
    with pytest.raises(ValueError, match="the schedule is 1f1b already"):
        Settings(cluster="cpu:1x4", schedule="1f1b", force=("schedule = zb-v",))
