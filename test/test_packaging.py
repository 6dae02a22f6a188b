"""The wheel holds all of Alpa's files and no others, and CMake finds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import alpa

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"cmake/alpa": "alpa"} | {
    name: f"alpa/{name}" for name in ("dialects", "passes", "runtime", "tools")
}
PACKAGES["frontends/torch"] = "alpa/torch"

needs_checkout = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs a git checkout"
)


def source_files(folder: str) -> set[str]:
    """The files of a folder that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    return {Path(name).relative_to(folder).as_posix() for name in names}


@needs_checkout
def test_wheel_holds_the_files_of_the_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, ROOT], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("alpa/")}
    assert packed == {
        f"{target}/{name}" for folder, target in PACKAGES.items() for name in source_files(folder)
    }
    assert {"alpa/py.typed", "alpa/AlpaConfig.cmake", "alpa/tools/alpa_opt.py"} <= packed


def test_extras_are_known() -> None:
    """The metadata parses, and what it names of other packages is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in extras.values() for text in extra)]
    of_jax = metadata.metadata("jax").get_all("Provides-Extra") or []
    for requirement in map(Requirement, texts):
        known = {"jax": of_jax, "alpa-mlir": extras}.get(requirement.name)
        assert known is None or requirement.extras <= {*known}, requirement
    assert {"cuda12", "cuda13"} <= {*extras}


def test_public_names_are_completed() -> None:
    assert {*alpa.__all__, "__version__"} <= {*dir(alpa)}


def test_console_scripts_load() -> None:
    scripts = metadata.distribution("alpa-mlir").entry_points.select(group="console_scripts")
    assert "alpa-opt" in scripts.names
    assert all(callable(script.load()) for script in scripts)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_runs_alpa_opt_in_a_build(tmp_path: Path) -> None:
    (tmp_path / "step.mlir").write_text(
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        "  %dead = stablehlo.negate %x : tensor<4xf32>\n"
        "  return %x : tensor<4xf32>\n}\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(plan NONE)\n"
        "find_package(Alpa REQUIRED)\n"
        'alpa_opt(INPUT step.mlir OUTPUT out.mlir PIPELINE "canonicalize{top-down=true},cse")\n'
        "add_custom_target(plan ALL DEPENDS out.mlir)\n"
    )
    environment = f"-DAlpa_OPT={Path(sys.executable).parent / 'alpa-opt'}"
    configure = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", environment]
    subprocess.run(
        [*configure, f"-DAlpa_DIR={Path(alpa.__file__).parent}"], check=True, capture_output=True
    )
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    assert "negate" not in (tmp_path / "build" / "out.mlir").read_text()
