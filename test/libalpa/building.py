"""Builds projects that use libalpa, as an embedder does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alpa
from alpa.tools.libpython import NoLibpythonError, of_this_interpreter


def missing() -> str:
    """What libalpa cannot be built without and is not here; empty if all is."""
    commands = [name for name in ("cmake", "cc", "c++") if shutil.which(name) is None]
    if commands:
        return f"needs {' and '.join(commands)}"
    try:
        of_this_interpreter()
    except NoLibpythonError:
        return "needs a Python with headers and a shared library"
    return ""


needs_compiler = pytest.mark.skipif(missing() != "", reason=missing())


def configure(source: Path, build: Path, **variables: object) -> str:
    """Configures a project with the installed package; returns CMake's warnings."""
    given = {
        "Alpa_DIR": Path(alpa.__file__).parent,
        "Alpa_OPT": Path(sys.executable).parent / "alpa-opt",
    } | variables
    command = ["cmake", "-S", source, "-B", build, *(f"-D{k}={v}" for k, v in given.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def build(source: Path, folder: Path) -> None:
    """Configures and builds a project, without a warning."""
    assert configure(source, folder) == ""
    done = subprocess.run(["cmake", "--build", folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
