"""Hints: a plan's decisions written down give the plan again."""

from __future__ import annotations

from pathlib import Path

from alpa.dialects import main_function, parse
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.pipelines.clock import Clock
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
