"""The example in C++ is configured, built and run as its comments say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import alpa.passes
from test.libalpa.building import build, needs_compiler

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
PLAN = "alpa{cluster=cpu:1x2 num-layers=2 num-stages=2}"


@needs_compiler
def test_a_program_in_cpp_plans_a_module_and_prints_its_stages(tmp_path: Path) -> None:
    build(EXAMPLE, tmp_path)
    step = EXAMPLE / "step.mlir"

    def plan(*arguments: str | Path) -> tuple[int, str, str]:
        done = subprocess.run([tmp_path / "plan", *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    status, out, error = plan(step, PLAN, tmp_path / "planned.mlir")
    assert (status, error) == (0, "")
    assert out.startswith("plan for cpu:1x2 (1 host x 2 CPU): 2 stages, ")
    rows = out[out.index("stage    mesh") :].splitlines()
    assert [row.split()[:2] for row in rows[1:3]] == [["0", "mesh_0"], ["1", "mesh_1"]]
    planned = alpa.passes.run(step.read_bytes(), PLAN)
    assert (tmp_path / "planned.mlir").read_text() == str(planned)

    status, out, error = plan(step, PLAN.replace("stages=2", "stages=9"))
    assert (status, out) == (1, "")
    assert error.startswith("module:2:1: error: cannot make 9 stages of 2 layer(s)")
    assert f'plan step.mlir "{PLAN}"' in (EXAMPLE / "plan.cpp").read_text()
