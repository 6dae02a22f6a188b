"""`alpa doctor` says what is there, what is missing, and how to install it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alpa.tools.doctor import probes
from alpa.tools.doctor.caches import Cache
from alpa.tools.doctor.diagnosis import Diagnosis, problems_of
from alpa.tools.doctor.packages import Package, extras, required
from alpa.tools.doctor.probes import Devices, Driver, RayCluster
from alpa.tools.doctor.text import lines

ROOT = Path(__file__).resolve().parents[3]
JAX = Package(name="jax", needed=">=0.10.2", version="0.10.2", fits=True)
JAXLIB = replace(JAX, name="jaxlib")
FOUND = Diagnosis(
    alpa="1.0",
    python="3.12.1",
    system="Linux x86_64",
    packages=(JAX, JAXLIB),
    extras={},
    plug_ins={},
    driver=Driver(version=None, gpus=()),
    devices=Devices(platform="cpu", kinds=("cpu", "cpu"), cluster="cpu:1x1", seconds=1.25),
    ray=RayCluster(seconds=3.5),
    compilers={"V100": ("jax-cuda12-plugin",), "H100": ()},
    caches=(),
)


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def remedies(found: Diagnosis) -> list[tuple[str, bool]]:
    return [(it.remedy, it.blocks) for it in problems_of(found)]


def test_this_machine_can_plan_and_run() -> None:
    said = doctor("-m", "alpa.tools.alpa", "doctor", "--no-ray", "--json")
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    assert found["works"] is True
    assert found["devices"]["kinds"] == ["cpu"] * 8
    assert found["devices"]["cluster"] == "cpu:1x1"
    assert found["ray"] is None
    versions = {it["name"]: it["version"] for it in found["packages"]}
    assert versions["jax"] == metadata.version("jax")
    assert not [problem for problem in found["problems"] if problem["blocks"]]


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder of packages with Alpa and packaging only."""
    (tmp_path / "alpa").mkdir()
    shutil.copy(ROOT / "cmake" / "alpa" / "__init__.py", tmp_path / "alpa")
    for name in ("dialects", "passes", "runtime", "tools"):
        (tmp_path / "alpa" / name).symlink_to(ROOT / name)
    packaging = metadata.distribution("packaging").locate_file("packaging")
    (tmp_path / "packaging").symlink_to(str(packaging))
    information = tmp_path / "alpa_mlir-1.0.dist-info"
    information.mkdir()
    needs = [f"Requires-Dist: {it}" for it in metadata.requires("alpa-mlir") or []]
    names = metadata.metadata("alpa-mlir").get_all("Provides-Extra") or []
    head = ["Metadata-Version: 2.1", "Name: alpa-mlir", "Version: 1.0"]
    text = "\n".join([*head, *needs, *(f"Provides-Extra: {name}" for name in names)])
    (information / "METADATA").write_text(f"{text}\n")
    return tmp_path


def test_nothing_is_installed(bare: Path) -> None:
    said = doctor("-S", "-m", "alpa.tools.alpa", "doctor", PYTHONPATH=str(bare))
    assert (said.returncode, said.stderr) == (1, "")
    assert "error: jax is not installed, jaxlib is not installed" in said.stdout
    assert "remedy: pip install 'jax>=0.10.2' 'jaxlib>=0.10.2'" in said.stdout
    assert said.stdout.endswith("Alpa cannot plan and run here.\n")
    version = doctor("-S", "-m", "alpa.tools.alpa", "--version", PYTHONPATH=str(bare))
    assert version.stdout == "alpa 1.0\n"


def test_what_it_needs_itself_is_not_installed(bare: Path) -> None:
    (bare / "packaging").unlink()
    said = doctor("-S", "-m", "alpa.tools.alpa", "doctor", PYTHONPATH=str(bare))
    assert said.returncode == 1
    assert said.stderr == (
        "alpa: error: packaging is not installed; run pip install packaging, then alpa doctor "
        "again\n"
    )


def test_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax": "0.9.0", "flax": "0.1", "ray": "3.0.0.dev0"}
    here = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or here(name))
    packages = {it.name: it for it in required()}
    assert packages["jax"].problem == "jax is 0.9.0, which is not >=0.10.2"
    assert packages["ray"].problem == ""
    found = replace(FOUND, packages=tuple(packages.values()), extras=extras())
    first, *others = remedies(found)
    assert first == ("pip install 'jax>=0.10.2'", True)
    assert ("pip install 'flax>=0.10'", False) in others


def test_extras_that_name_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {
        "alpa-mlir": ['jax[cuda12]>=0.10.2; extra == "cuda12"', 'pip; extra == "dev"'],
        "jax": ["numpy", 'jax-cuda12-plugin[with-cuda]>=0.10.2; extra == "cuda12"'],
    }
    names = {"Provides-Extra": ["cuda12", "dev"]}

    def found(what: Mapping[str, Any], name: str) -> Any:
        if name not in what:
            raise metadata.PackageNotFoundError(name)
        return what[name]

    monkeypatch.setattr(metadata, "metadata", lambda _: SimpleNamespace(get_all=names.get))
    monkeypatch.setattr(metadata, "requires", partial(found, needs))
    monkeypatch.setattr(metadata, "version", partial(found, {"jax": "0.10.2"}))
    (packages,) = extras().values()
    assert [it.problem for it in packages] == ["", "jax-cuda12-plugin[with-cuda] is not installed"]


def test_gpus_that_jax_does_not_see() -> None:
    assert remedies(FOUND) == []
    found = replace(FOUND, driver=Driver(version="550.54", gpus=("NVIDIA H200",)))
    assert remedies(found) == [("pip install 'jax[cuda12]'", False)]
    old = replace(found, plug_ins={"jax-cuda12-plugin": "0.9.0", "jax-rocm7-plugin": "0.1"})
    assert remedies(old) == [
        ("pip install 'jax-cuda12-plugin==0.10.2'", False),
        ("unset JAX_PLATFORMS", False),
    ]


def test_what_does_not_run() -> None:
    broken = Devices(problem="ImportError: no")
    failed = Devices(platform="gpu", kinds=("H200",), problem="out of memory")
    ray = RayCluster(problem="no answer within 180 s")
    for found in (replace(FOUND, devices=broken), replace(FOUND, devices=failed)):
        assert [it.blocks for it in problems_of(found)] == [True]
    (problem,) = problems_of(replace(FOUND, ray=ray))
    assert problem.blocks
    assert problem.what == "Ray can neither be joined nor started: no answer within 180 s"


def test_caches(tmp_path: Path) -> None:
    folder = tmp_path / "alpa"
    assert not Cache.of(folder, "stages").exists
    folder.mkdir(mode=0o700)
    (folder / "verified").mkdir()
    (folder / "a.xla").write_bytes(b"1234")
    (folder / "a.xla").chmod(0o600)
    found = Cache.of(folder, "stages")
    assert (found.files, found.bytes, found.problem) == (1, 4, "")
    (folder / "a.xla").chmod(0o620)
    found = Cache.of(folder, "stages")
    assert "other users can write to it" in found.problem
    assert remedies(replace(FOUND, caches=(found,))) == [(f"chmod -R go-w {folder}", True)]


def test_the_driver_is_read_from_its_files(tmp_path: Path) -> None:
    assert Driver.here(tmp_path) == Driver(version=None, gpus=())
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    for number in range(2):
        gpu = tmp_path / "gpus" / f"0000:0{number}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    assert Driver.here(tmp_path) == Driver(version="550.54.15", gpus=("NVIDIA H200",) * 2)


def test_the_text() -> None:
    found = replace(FOUND, problems=tuple(problems_of(FOUND)))
    assert "\n".join(lines(found)) == (
        "Alpa 1.0, Python 3.12.1, Linux x86_64\n\n"
        "packages\n  jax 0.10.2 (>=0.10.2)\n  jaxlib 0.10.2 (>=0.10.2)\n\n"
        "extras\n\n"
        "devices\n  JAX sees 2 x cpu (cpu)\n"
        "  a step was planned for cpu:1x1 and run in 1.2 s\n\n"
        "Ray\n  no cluster runs here; one starts in 3.5 s\n\n"
        "compiling for GPUs without having one\n"
        "  possible for H100\n  not possible for V100; pip install jax-cuda12-plugin\n\n"
        "caches\n\n"
        "Alpa can plan and run here."
    )


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_LONGEST", 0.01)
    assert probes.devices() == Devices(problem="no answer within 0 s")


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    found = probes.devices()
    assert found.platform is None
    assert "nonsense" in found.problem


@pytest.mark.usefixtures("ray_cluster")
def test_a_running_ray_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray  # noqa: PLC0415 - a slow import

    address = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", address)
    found = probes.ray_cluster()
    assert found == RayCluster(address=address, nodes=1, resources={"CPU": 16.0})


@pytest.mark.slow
def test_a_ray_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    found = probes.ray_cluster()
    assert (found.address, found.problem) == (None, "")
    assert found.seconds is not None
