"""Shared fixtures: eight virtual CPU devices, no deadline per example, a small cluster.

JAX reads its environment when it is imported, so this file sets it before any test imports JAX. XLA
reads its flags when JAX first asks for devices.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import is_hypothesis_test, settings
from packaging.version import Version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Fewer of LLVM's passes, and one module of LLVM for each of XLA's, because most programs of tests
# run once. The examples, the demo and the blocks of the documentation are compiled as users
# compile.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# The default tier also uses XLA's older emitters of fused ops, which compile in less than half of
# the time; the slow tier uses those that users have. jaxlib has this flag up to 0.10.
OLDER_EMITTERS = " --xla_cpu_use_fusion_emitters=false"

# The default tier draws the same examples on every run. With any other mark expression, such as `-m
# slow`, property tests draw new examples and count as slow tests. A failing test prints the
# decorator `@reproduce_failure`, which draws its example again. A profile applies to tests that are
# imported after it is loaded, so the configuration loads it.
settings.register_profile("alpa", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)


def explores(config: pytest.Config) -> bool:
    return config.getoption("markexpr") != "not slow"


def pytest_configure(config: pytest.Config) -> None:
    has_older = Version(version("jaxlib")) < Version("0.11")
    older = OLDER_EMITTERS if has_older and not explores(config) else ""
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS + older)
    # By default every 700th new object starts a collection, which takes 5 % of the time of all
    # tests: they make many objects, and few cycles.
    gc.set_threshold(20_000)
    # A shell ignores SIGINT in what it starts in the background, and so would all processes that
    # tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("explore" if explores(config) else "alpa")


SMALL = """\
hosts = {hosts}
devices_per_host = {devices}
[device]
name = "{name}"
memory = "{memory}"
peak_flops = {{ f32 = {flops} }}
memory_bandwidth = {memory_bandwidth}
[intra_host]
bandwidth = {bandwidth}
latency = 1e-6
[inter_host]
bandwidth = {bandwidth}
latency = 1e-6
"""


class SmallCluster(Protocol):
    """Writes the file of a small cluster; FLOP/s and bytes/s."""

    def __call__(
        self,
        memory: str = "16GiB",
        *,
        name: str = "small",
        hosts: int = 1,
        devices: int = 4,
        flops: float = 1e12,
        memory_bandwidth: float = 1e11,
        bandwidth: float = 1e9,
    ) -> Path: ...


@pytest.fixture
def small_cluster(tmp_path: Path) -> SmallCluster:
    def write(
        memory: str = "16GiB",
        *,
        name: str = "small",
        hosts: int = 1,
        devices: int = 4,
        flops: float = 1e12,
        memory_bandwidth: float = 1e11,
        bandwidth: float = 1e9,
    ) -> Path:
        path = tmp_path / f"{name}_{memory}.toml"
        path.write_text(
            SMALL.format(
                name=name,
                hosts=hosts,
                memory=memory,
                devices=devices,
                flops=flops,
                memory_bandwidth=memory_bandwidth,
                bandwidth=bandwidth,
            )
        )
        return path

    return write


@pytest.fixture
def low_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates of stages that forget the cotangents which layers are given, so that a first cut
    may not fit."""
    monkeypatch.setattr("alpa.passes.stages.class_part._cotangents", lambda *_: iter(()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps each test file in one of several processes, and all files that use Ray in one. Slow
    tests may take any time."""
    for item in items:
        if explores(config) and is_hypothesis_test(getattr(item, "function", None)):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and (missing := missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))
        uses_ray = "ray_cluster" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("ray" if uses_ray else str(item.path)))


@cache
def missing_gpu() -> str:
    """Why tests for GPUs cannot run here; empty if they can. They have processes of their own,
    because JAX is on CPU in this one."""
    drivers = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd")]
    if not drivers:
        return "needs a GPU, and this machine has none"
    code = "import jax; print(jax.devices()[0].platform)"
    environment = {**os.environ, "JAX_PLATFORMS": ""}
    probe = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    if probe.stdout.split()[-1:] == ["gpu"]:
        return ""
    return 'needs a GPU that JAX finds: pip install "jax[cuda12]", and see nvidia-smi'


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests were skipped, and why: pytest itself gives only their number."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        *_, reason = report.longrepr
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped tests")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count}: {reason}")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray cluster for all tests, in this process; it declares more CPUs than there are, and no
    GPU, so that these tests run on CPU everywhere."""
    ray = pytest.importorskip("ray")  # a slow import, which most test files do without
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200_000_000,
    )
    yield
    ray.shutdown()
