"""Executables that were compiled in one process are loaded in others, which compile nothing."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa import passes, runtime
from alpa.dialects import bytecode, ir, parse
from alpa.passes.plan.instructions import write_script
from alpa.runtime.ahead_of_time import compilation
from alpa.runtime.ahead_of_time.compilation import CompilationError, NoCompilerError, Progress
from alpa.runtime.ahead_of_time.exporting import Executables, export_executables
from alpa.runtime.ahead_of_time.verification import verify_plan
from alpa.runtime.compile_cache import UnsafeCacheError, is_intact, xla_flags
from alpa.runtime.exported import exported, module_name

needs_gpu_compiler = pytest.mark.skipif(
    compilation.missing_packages() != [], reason="needs the extra gpu-aot"
)
NVIDIA = Path("/proc/driver/nvidia/version")
TWO_STAGES = "num-stages=2 num-layers=2"
# Loads a plan in a fresh process, runs a step, and says what was read.
RUN = """
import sys

import jax
import numpy as np

import alpa.runtime

plan, executables, arguments, results = sys.argv[1:]
step = alpa.runtime.load(plan, executables=executables)
for stage in step.stages.values():
    print("read" if stage.read_from else "compiled")
given = np.load(arguments)
np.savez(results, *map(np.asarray, step(*(given[name] for name in given.files))))
"""


@dataclass(frozen=True)
class Export:
    """A plan for four CPU devices, and the folder of its executables."""

    plan: str
    written: Executables

    @property
    def folder(self) -> Path:
        return self.written.folder


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, planned: Callable[..., ir.Module]) -> Export:
    module = planned("cpu:1x4", TWO_STAGES)
    folder = tmp_path_factory.mktemp("export") / "executables"
    return Export(str(module), export_executables(module, folder, processes=1))


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    u, w = (generator.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(2))
    return [u, w, generator.normal(size=(1024, 64)).astype(np.float32)]


def results_without(plan: str) -> list[np.ndarray]:
    """The results of a step whose stages are compiled here."""
    return [np.asarray(it) for it in runtime.load(plan)(*arguments())]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for result, it in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result, it)


def run(
    tmp_path: Path, plan: str, folder: Path, environment: Mapping[str, str]
) -> tuple[list[str], str, list[np.ndarray]]:
    """What a fresh process reads and compiles, its standard error, and its results."""
    paths = [tmp_path / name for name in ("plan.mlir", "arguments.npz", "results.npz")]
    paths[0].write_text(plan)
    np.savez(paths[1], *arguments())
    command = [sys.executable, "-c", RUN, paths[0], folder, *paths[1:]]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = np.load(paths[2])
    return done.stdout.split(), done.stderr, [written[name] for name in written.files]


def test_a_fresh_process_compiles_no_stage(export: Export, tmp_path: Path) -> None:
    assert export.written.stages > len(export.written.files)  # equal updates have one file
    log = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cpu_compiler=1"}
    log |= {"XLA_FLAGS": xla_flags(), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "6"}
    (tmp_path / "none").mkdir()
    said, errors, compiled = run(tmp_path, export.plan, tmp_path / "none", log)
    assert said == ["compiled"] * export.written.stages
    assert len(re.findall(r"Running HLO passes on \[mesh_", errors)) == export.written.stages
    said, errors, read = run(tmp_path, export.plan, export.folder, log)
    assert said == ["read"] * export.written.stages
    # XLA counts for itself. It has compiled other programs, of JAX, in this process.
    assert "Running HLO passes on [" in errors
    assert "Running HLO passes on [mesh_" not in errors
    assert_equal(read, compiled)
    assert_equal(read, results_without(export.plan))


def test_on_ray_no_stage_is_compiled(
    export: Export, ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    workers = runtime.WorkerOptions(cache_directory=None, timeout_seconds=120)
    with runtime.load(
        export.plan, executor="ray", workers=workers, executables=[export.folder]
    ) as step:
        files = {stage.read_from for stage in step.stages.values()}
        assert files == set(export.written.files)
        found = [np.asarray(it) for it in step(*arguments())]
    assert_equal(found, results_without(export.plan))
    # A busy machine may say for which workers it waits.
    assert [it for it in caplog.records if it.name != "alpa.runtime.workers.waiting"] == []


def test_on_ray_executables_of_another_worker_are_loaded_first(
    export: Export, ray_cluster: None
) -> None:
    """As in a mesh over several hosts with GPUs, whose first worker reads for all."""
    workers = runtime.WorkerOptions(cache_directory=None, timeout_seconds=120)
    stages = exported(parse(export.plan))
    modules = {name: bytecode(op) for name, op in stages.nested.items()}
    with runtime.load(
        export.plan, executor="ray", workers=workers, executables=export.folder
    ) as step:
        files = {name: stage.read_from for name, stage in step.stages.items()}
        own = {module_name(f) for f in step.program.fragments if f.mesh == "mesh_0"}
        read = {name: path.read_bytes() for name, path in files.items() if name in own and path}
        assert read.keys() == own
        given = {name: content.split(b"\n", 2)[2] for name, content in read.items()}
        number, script = step._loaded + 1, write_script(step.program)

        def ask(method: str, *arguments: Any) -> Any:
            return step._group.call("mesh_0", method, number, *arguments).wait()[0]

        loaded = ask("load", script, modules, None, (export.folder,), given)
        assert loaded.executables == {}  # This worker is not the mesh's first.
        assert [ask("read_from", name) for name in own] == [None] * len(own)
        for name in own:
            assert ask("hlo_text", name) == step.stages[name].hlo_text()


def test_a_saved_plan_of_a_function_is_run_from_executables(tmp_path: Path) -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = alpa.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    w, x = jnp.ones((8, 8)), jnp.arange(64.0).reshape(8, 8) / 64
    options = {"cluster": "cpu:1x2", "num_micro_batches": 2}
    planned = alpa.parallelize(step, **options).plan(w, x)
    planned.save(tmp_path / "plan.mlir")
    folder = tmp_path / "executables"
    written = export_executables(planned.module, folder, processes=1)
    train_step = alpa.parallelize(
        step, plan=tmp_path / "plan.mlir", executables=str(folder), **options
    )
    stages = train_step.executable(w, x).stages.values()
    assert {stage.read_from for stage in stages} == set(written.files)
    for result, it in zip(train_step(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(result, it, rtol=1e-5)


def test_other_options_and_damage_are_compiled(
    export: Export, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"xla_cpu_enable_fast_min_max": True}
    step = runtime.load(export.plan, compiler_options=options, executables=export.folder)
    assert all(stage.read_from is None for stage in step.stages.values())
    assert len(caplog.records) == len(step.stages)
    for name, record in zip(step.stages, caplog.records, strict=True):
        assert record.getMessage() == (
            f"@{name} is compiled: {export.folder} has it for options [] "
            '(here [["xla_cpu_enable_fast_min_max", "True"]])'
        )
    caplog.clear()
    folder = tmp_path / "damaged"
    shutil.copytree(export.folder, folder)
    damaged = next(folder.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    step = runtime.load(export.plan, executables=[folder])
    missing = [stage.read_from for stage in step.stages.values()].count(None)
    assert 1 <= missing < len(step.stages)
    assert {record.getMessage() for record in caplog.records} == {
        f"{damaged} is not used: it is damaged, or another program's; it is compiled again"
    }
    assert_equal([np.asarray(it) for it in step(*arguments())], results_without(export.plan))


def test_what_is_verified_is_exported_without_compiling_again(
    planned: Callable[..., ir.Module], tmp_path: Path
) -> None:
    module, seen = planned("cpu:1x2"), list[Progress]()
    cache = tmp_path / "cache"
    verify_plan(module, processes=1, cache=cache)
    # Executables were not asked for.
    assert list(cache.glob("*.xla")) == []
    verify_plan(module, processes=1, cache=cache, executables=True, on_progress=seen.append)
    assert seen[0].kept == 0
    seen.clear()
    written = export_executables(
        module, tmp_path / "out", processes=1, cache=cache, on_progress=seen.append
    )
    assert seen == [Progress(done=2, kept=2, distinct=2)]
    assert {it.name for it in cache.glob("*.xla")} == {it.name for it in written.files}
    step = runtime.load(module, executables=tmp_path / "out")
    assert {stage.read_from for stage in step.stages.values()} == set(written.files)
    text = str(written)
    assert text.startswith("executables: 2 files of 2 stages, ")
    assert text.endswith(f"in {tmp_path / 'out'}")


def test_kept_executables_are_checked_before_they_are_exported(
    planned: Callable[..., ir.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, cache, seen = planned("cpu:1x1"), tmp_path / "cache", list[Progress]()
    first = export_executables(module, tmp_path / "out", processes=1, cache=cache)
    kept = cache / first.files[0].name
    kept.write_bytes(kept.read_bytes()[:-1])
    again = export_executables(
        module, tmp_path / "again", processes=1, cache=cache, on_progress=seen.append
    )
    assert seen[0].kept == len(first.files) - 1
    assert [record.getMessage() for record in caplog.records] == [
        f"{kept} is not used: it is damaged, or another program's; it is compiled again"
    ]
    assert all(map(is_intact, again.files))
    (tmp_path / "file").touch()
    with pytest.raises(CompilationError, match=r"the executable of @mesh_0\..* cannot be written"):
        export_executables(module, tmp_path / "o", processes=1, cache=tmp_path / "file" / "cache")
    kept.chmod(0o666)
    with pytest.raises(UnsafeCacheError, match="other users can write to it"):
        export_executables(module, tmp_path / "third", processes=1, cache=cache)


def test_a_device_without_a_description(
    planned: Callable[..., ir.Module], small_cluster: Callable[..., Path], tmp_path: Path
) -> None:
    module = planned(str(small_cluster(devices=2)))
    with pytest.raises(NoCompilerError, match="no description of 'small'"):
        export_executables(module, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_gpu_compiler
def test_executables_for_gpus_are_written_without_one(
    planned: Callable[..., ir.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Left to itself, the search takes one host for so little work.
    module = planned("h100:2x2", "num-stages=1")
    written = export_executables(module, tmp_path / "gpu", processes=1)
    assert written.tuned_on_device == ()
    heads = [path.read_bytes().split(b"\n", 2)[1].decode() for path in written.files]
    assert all('"device": "NVIDIA H100 80GB HBM3"' in head for head in heads)
    assert all('"processes": [0, 0, 1, 1]' in head for head in heads)
    # They are not for CPU devices, and a plan does not say which devices run it.
    cpu = planned("cpu:2x2")
    with caplog.at_level(logging.WARNING, "alpa"):
        step = runtime.load(cpu, executables=tmp_path / "gpu")
    assert all(stage.read_from is None for stage in step.stages.values())
    assert all("is compiled: " in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == len(step.stages)


CONVOLUTION = """
func.func public @main(%x: tensor<8x16x16x32xf32>, %w: tensor<3x3x32x32xf32>)
    -> tensor<8x16x16x32xf32> {
  %y = stablehlo.convolution(%x, %w)
    dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {pad = [[1, 1], [1, 1]]}
    {batch_group_count = 1 : i64, feature_group_count = 1 : i64}
    : (tensor<8x16x16x32xf32>, tensor<3x3x32x32xf32>) -> tensor<8x16x16x32xf32>
  return %y : tensor<8x16x16x32xf32>
}
"""


@needs_gpu_compiler
def test_stages_that_call_cudnn_get_no_executable(tmp_path: Path) -> None:
    module = parse(CONVOLUTION)
    passes.run(module, "alpa{cluster=h100:1x1}")
    for _ in range(2):  # the second time from the cache
        written = export_executables(
            module, tmp_path / "out", processes=1, cache=tmp_path / "cache"
        )
        assert written.files == ()
        assert len(written.tuned_on_device) == written.stages == 1
        assert f"none for {written.tuned_on_device[0]}: cuDNN's kernels" in str(written)


def gpu_name() -> str:
    """The name of this machine's first GPU, as its driver reports it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


@pytest.mark.gpu
@needs_gpu_compiler
@pytest.mark.skipif(not NVIDIA.exists(), reason="needs a GPU")
def test_a_gpu_loads_what_was_compiled_without_one(
    planned: Callable[..., ir.Module], tmp_path: Path
) -> None:
    named = {gpu.name: device for device, gpu in compilation.TARGETS.items()}
    presets = {"V100-SXM2-16GB": "v100-16gb", "V100-SXM2-32GB": "v100-32gb"}
    presets |= {"A100-SXM4-40GB": "a100-40gb", "A100-SXM4-80GB": "a100-80gb"}
    presets |= {"H100-SXM5-80GB": "h100", "H200-SXM5-141GB": "h200", "B200-SXM": "b200"}
    name = gpu_name()
    if name not in named:
        pytest.skip(f"there is no description of {name}")
    module = planned(f"{presets[named[name]]}:1x1")
    written = export_executables(module, tmp_path / "gpu", processes=1)
    cuda = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": xla_flags()}
    said, _, read = run(tmp_path, str(module), written.folder, cuda)
    assert said == ["read"] * written.stages
    (tmp_path / "none").mkdir()
    said, _, compiled = run(tmp_path, str(module), tmp_path / "none", cuda)
    assert said == ["compiled"] * written.stages
    # Kernels differ, and may multiply with fewer bits (TF32). Another program differs more.
    for result, it in zip(read, compiled, strict=True):
        assert np.max(np.abs(result - it)) <= 1e-2 * np.max(np.abs(it))
