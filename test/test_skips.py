"""The summary of a test run names what was skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from alpa.runtime.ahead_of_time.compilation import missing_packages

HERE = Path(__file__).parent


def test_the_summary_says_what_was_skipped_and_why() -> None:
    """With and without the extra gpu-aot, one of these two tests is skipped."""
    file = "runtime/ahead_of_time/test_verification.py"
    names = ["test_without_the_extra_a_message_says_what_to_install"]
    names += ["test_a_gpu_has_less_memory_than_its_label"]
    tests = [f"{HERE / file}::{name}" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *tests],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
    )
    assert done.returncode == 0, done.stdout
    missing = missing_packages() != []
    reason = "needs the extra gpu-aot" if missing else "the extra gpu-aot is installed"
    _, summary = done.stdout.split("skipped tests")
    assert summary.splitlines()[1] == f"1: {reason}"
