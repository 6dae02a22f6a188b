"""Every lit test as a test of pytest, so that one command runs them all.

The commands of a file run in this process, because `alpa-opt` takes longer to start than most files
take. `lit -v test` runs the same lines in processes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path

import filecheck.main
import pytest

from alpa.tools import alpa_opt

ROOT = Path(__file__).resolve().parent
CASES = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.mlir") if "Inputs" not in path.parts
)
RUN = re.compile(
    r"// RUN: (?P<fails>not )?alpa-opt (?P<arguments>.+?)(?P<errors> 2>&1)?"
    r"( \| filecheck (?P<checks>[^|]+))?"
)

# `python -m lit.main` does nothing: the module has no entry point but this function.
LIT = [sys.executable, "-c", "from lit.main import main; main()"]


def run_lit(path: Path) -> subprocess.CompletedProcess[str]:
    command = [*LIT, "-v", "--no-progress-bar", "-j1", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextmanager
def written_to(file: Path, *, errors: bool) -> Iterator[None]:
    """Redirects the standard output, and errors too, of this process and of MLIR's C++."""
    numbers = (1, 2) if errors else (1,)
    saved = [(number, os.dup(number)) for number in numbers]
    try:
        with file.open("w", encoding="utf-8", buffering=1) as stream:
            for number in numbers:
                os.dup2(stream.fileno(), number)
            with redirect_stderr(stream) if errors else nullcontext():
                yield
    finally:
        for number, before in saved:
            os.dup2(before, number)
            os.close(before)


def run_line(line: str, path: Path, folder: Path) -> None:
    """Runs a RUN line as lit does. Fails the test if the line does not hold."""
    parsed = RUN.fullmatch(line)
    assert parsed, f"write this line as the other files do: {line}"
    output = folder / "output"
    names = [str(path) if word == "%s" else word for word in shlex.split(parsed["arguments"])]
    with written_to(output, errors=parsed["errors"] is not None):
        status = alpa_opt.main(names)
    assert status == (1 if parsed["fails"] else 0), f"exit status {status}: {line}"
    if parsed["checks"]:
        options = [str(path) if word == "%s" else word for word in shlex.split(parsed["checks"])]
        with pytest.raises(SystemExit) as end:
            filecheck.main.main(["filecheck", *options, "--input-file", str(output)])
        assert not end.value.code, line


@pytest.mark.parametrize("case", CASES)
def test_lit(case: str, tmp_path: Path) -> None:
    path = ROOT / case
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "RUN:" in line]
    assert lines, "no RUN line"
    for line in lines:
        run_line(line, path, tmp_path)


def test_lit_runs_a_file() -> None:
    done = run_lit(ROOT / "tools" / "alpa_opt.mlir")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed: 1" in done.stdout


def test_a_wrong_check_fails(tmp_path: Path) -> None:
    (tmp_path / "lit.cfg.py").write_text((ROOT / "lit.cfg.py").read_text())
    line = "// RUN: alpa-opt %s --pipeline=canonicalize | filecheck %s"
    path = tmp_path / "wrong.mlir"
    path.write_text(f"{line}\n// CHECK: not in the output\nfunc.func @main() {{ return }}\n")
    assert run_lit(path).returncode != 0
    with pytest.raises(AssertionError, match="RUN: alpa-opt"):
        run_line(line, path, tmp_path)
