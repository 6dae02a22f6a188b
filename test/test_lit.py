"""Every lit test as a test of pytest, so that one command runs them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
CASES = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.mlir") if "Inputs" not in path.parts
)


# `python -m lit.main` does nothing: the module has no entry point but this function.
LIT = [sys.executable, "-c", "from lit.main import main; main()"]


def run_lit(path: Path) -> subprocess.CompletedProcess[str]:
    command = [*LIT, "-v", "--no-progress-bar", "-j1", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", CASES)
def test_lit(case: str) -> None:
    done = run_lit(ROOT / case)
    if done.returncode or "Passed: 1" not in done.stdout:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


def test_a_wrong_check_fails(tmp_path: Path) -> None:
    (tmp_path / "lit.cfg.py").write_text((ROOT / "lit.cfg.py").read_text())
    (tmp_path / "wrong.mlir").write_text(
        "// RUN: alpa-opt %s --pipeline=canonicalize | filecheck %s\n"
        "// CHECK: not in the output\n"
        "func.func @main() { return }\n"
    )
    assert run_lit(tmp_path / "wrong.mlir").returncode != 0
