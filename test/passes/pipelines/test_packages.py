"""Passes of other packages: installed ones run by name, and what is wrong with one is located."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import alpa.passes
from alpa.dialects import ir, make_context
from alpa.passes import pipeline
from alpa.passes.pipelines.packages import GROUP
from alpa.passes.pipelines.text import PipelineError

PACKAGE = Path(__file__).parent / "package"
ALPA_OPT = Path(sys.executable).parent / "alpa-opt"
PROGRAM = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""


def install(folder: Path, name: str, entries: dict[str, str]) -> None:
    """Writes what pip writes of a package with entry points."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{entry} = {value}" for entry, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that Python looks into."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def installed(site: Path) -> Path:
    """The folder, with the package of this folder installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    install(site, project["name"], project["entry-points"][GROUP])
    shutil.copy(PACKAGE / "alpa_count_ops.py", site)
    return site


def refused(text: str) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        pipeline.check(text)
    return caught.value


@pytest.mark.usefixtures("installed")
def test_a_pass_of_a_package_runs_beside_others() -> None:
    said: list[str] = []
    alpa.passes.run(
        PROGRAM, "cse,count-ops,canonicalize", on_remark=lambda _, text: said.append(text)
    )
    assert said == ["@main has 2 ops"]
    with pytest.raises(ir.MLIRError, match="@main has 2 ops, most=1"):
        alpa.passes.run(PROGRAM, "count-ops{most=1}")


@pytest.mark.usefixtures("installed")
def test_its_options_and_its_place_are_checked_as_those_of_ours() -> None:
    error = refused("cse,count-ops{mots=1}")
    assert (error.column, error.note) == (15, "its options and their defaults: most=1000")
    assert error.message == "unknown option 'mots' of 'count-ops'; did you mean 'most'?"
    assert "it cannot stand inside func.func(...)" in refused("func.func(count-ops)").message
    assert "did you mean 'count-ops'?" in refused("cuont-ops").message


def test_the_command_runs_and_lists_it(installed: Path) -> None:
    def alpa_opt(*options: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = [ALPA_OPT, *options]
        return subprocess.run(
            command, input=PROGRAM, env=environment, capture_output=True, text=True, check=True
        )

    assert "<stdin>:1:1: remark: @main has 2 ops" in alpa_opt("--pipeline=count-ops").stderr
    listed = alpa_opt("--list-passes").stdout
    assert "Passes of other packages:\n  count-ops\n      Says how many ops" in listed


def test_without_the_package_it_is_unknown() -> None:
    assert refused("count-ops").message.startswith("unknown pass 'count-ops'")
    assert pipeline.installed(make_context()).passes == {}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero ("),
        ("import alpa_no_such_module", "ModuleNotFoundError: No module named 'alpa_no_such_mod"),
        ("", "AttributeError: module 'alpa_broken' has no attribute 'Broken'"),
        ("Broken = 3", "TypeError: alpa_broken:Broken is no subclass of alpa.passes.Pass"),
        (
            "from alpa_count_ops import CountOps as Broken",
            "ValueError: alpa_broken:Broken has the name 'count-ops'",
        ),
    ],
)
def test_a_package_that_does_not_load(
    installed: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    install(installed, "broken", {"broken": "alpa_broken:Broken"})
    (installed / "alpa_broken.py").write_text(source)
    monkeypatch.delitem(sys.modules, "alpa_broken", raising=False)
    error = refused("cse,broken")
    assert error.column == 5
    assert error.message.startswith(f"pass 'broken' of package 'broken' does not load: {reason}")
    monkeypatch.delitem(sys.modules, "alpa_broken", raising=False)
    pipeline.check("cse,count-ops")  # the other package can be used
    done = list_passes(installed)
    assert done.returncode == 1
    assert f"alpa-opt: error: {error.message[:50]}" in done.stderr
    assert "Passes of other packages:\n  count-ops\n      Says how many ops" in done.stdout
    assert "broken" not in done.stdout


def list_passes(site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ALPA_OPT, "--list-passes"],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alpa", "pass 'alpa' of package 'other' has the name of a pass of Alpa; rename it or"),
        ("cse", "pass 'cse' of package 'other' has the name of a pass of MLIR; rename it or"),
        ("count-ops", "has the name of a pass of package"),
    ],
)
def test_a_name_that_is_taken(installed: Path, name: str, message: str) -> None:
    """Only the pass of that name cannot be used. Alpa's and MLIR's are not replaced."""
    install(installed, "other", {name: "other:Pass"})
    if name == "count-ops":
        error = refused("canonicalize,count-ops")
        assert error.column == 14
        assert message in error.message
    else:
        pipeline.check("canonicalize,count-ops")
    pipeline.check("canonicalize")  # Nothing but Alpa and MLIR is needed.
    done = list_passes(installed)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert ("Passes of other packages:\n  count-ops" in done.stdout) == (name != "count-ops")
    assert "\n  stage-mesh-partition\n" in done.stdout
