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


@pytest.mark.parametrize("case", CASES)
def test_lit(case: str) -> None:
    command = [sys.executable, "-m", "lit.main", "-v", "--no-progress-bar", "-j1", str(ROOT / case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
