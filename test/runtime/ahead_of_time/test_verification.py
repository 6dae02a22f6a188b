"""`alpa.runtime.ahead_of_time`: plans against what the compiler of their devices makes of them.

Compiling for GPUs needs no GPU, but XLA's plug-in; without it those tests are skipped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import alpa.passes
from alpa.dialects import ir
from alpa.passes.cost.presets import IDEAL, PRESETS
from alpa.passes.plan.instructions import write_script
from alpa.runtime.ahead_of_time import compilation
from alpa.runtime.ahead_of_time.compilation import (
    CompilationError,
    Progress,
    compile_ahead,
    gpu_of,
)
from alpa.runtime.ahead_of_time.results import CompiledStage
from alpa.runtime.ahead_of_time.targets import TARGETS
from alpa.runtime.ahead_of_time.verification import MeshCheck, verify_plan
from alpa.runtime.exported import exported, module_name
from alpa.runtime.script_checks import verify

needs_gpu_compiler = pytest.mark.skipif(
    compilation.missing_packages() != [], reason="needs the extra gpu-aot"
)


def test_a_plan_for_cpu(planned: Callable[..., ir.Module], tmp_path: Path) -> None:
    module = planned("cpu:1x4", "num-stages=2 num-layers=2")
    before = str(module)
    found = verify_plan(module, processes=1, cache=tmp_path)
    assert str(module) == before
    assert found.fits
    names = [module_name(f) for f in exported(module).program.fragments]
    assert [it.name for it in found.modules] == names
    forward = found.modules[0]
    # Each device multiplies 128 rows.
    assert forward.flops == pytest.approx(forward.real.flops, rel=0.01)
    assert forward.flops == pytest.approx(2 * 128 * 64 * 64, rel=0.01)
    assert all(a == b for it in found.modules for a, b in it.payloads.values())
    update = next(it for it in found.modules if "all-reduce" in it.payloads)
    assert update.counts["all-reduce"] == (1, 1)
    text = str(found).splitlines()
    assert text[0].startswith("compiled for CPU")
    assert text[-1].startswith("mesh_1")
    assert text[-1].endswith("fits")
    stored = json.loads(json.dumps(found.to_json()))
    assert stored["meshes"][0]["usable_bytes"] == PRESETS["cpu"].device.memory


def test_a_plan_for_two_kinds(planned: Callable[..., ir.Module], tmp_path: Path) -> None:
    kinds = "cpu:1x2+cpu:1x2,memory=64MiB"
    module = planned(kinds, "num-layers=2 meshes=0-1:2,2-3:2")
    found = verify_plan(module, processes=1, cache=tmp_path)
    assert found.fits
    assert {mesh.usable for mesh in found.meshes} == {PRESETS["cpu"].device.memory, 64 * 2**20}
    assert found.device == "CPU"
    assert all(a == b for it in found.modules for a, b in it.payloads.values())


def test_a_mesh_holds_what_it_keeps_and_what_xla_needs_inside(
    planned: Callable[..., ir.Module], tmp_path: Path
) -> None:
    stages = exported(planned("cpu:1x2"))
    real = compile_ahead(stages, processes=1)
    script = write_script(stages.program)
    kept = verify(script).peak_bytes["mesh_0"]
    most = {name: kept if "backward" in name else 0 for name in real}
    inside = verify(script, inside=lambda f: most[module_name(f)]).peak_bytes["mesh_0"]
    assert kept < inside <= 2 * kept


def test_equal_stages_are_compiled_once_and_kept(
    planned: Callable[..., ir.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Equal updates of two meshes.
    stages = exported(planned("cpu:1x4", "num-stages=2 num-layers=2"))
    seen: list[Progress] = []

    def compiled() -> dict[str, CompiledStage]:
        seen.clear()
        return compile_ahead(stages, processes=1, cache=tmp_path, on_progress=seen.append)

    first = compiled()
    distinct = len(list(tmp_path.iterdir()))
    assert distinct < len(first) == len(stages.program.fragments)
    assert seen[-1] == Progress(done=distinct, kept=0, distinct=distinct)
    assert compiled() == first
    assert seen == [Progress(done=distinct, kept=distinct, distinct=distinct)]
    next(iter(tmp_path.iterdir())).write_text('{"collectives": 3')
    with caplog.at_level(logging.WARNING):
        assert compiled() == first
    assert "is not used" in caplog.text
    assert seen[-1].kept == distinct - 1


def test_a_stage_that_xla_refuses(planned: Callable[..., ir.Module], tmp_path: Path) -> None:
    module = planned("cpu:1x2")
    with pytest.raises(CompilationError, match=r"XLA cannot compile @mesh_0\..*no_such_option"):
        verify_plan(module, processes=1, compiler_options={"xla_no_such_option": True})


def test_devices_that_nothing_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompilationError, match=r"no description of 'TPU v9'.* H100-SXM5-80GB"):
        gpu_of("TPU v9")
    assert gpu_of("CPU") is None


@pytest.mark.skipif(compilation.missing_packages() == [], reason="the extra gpu-aot is installed")
def test_without_the_extra_a_message_says_what_to_install() -> None:
    with pytest.raises(CompilationError, match=r"pip install 'alpa-mlir\[gpu-aot\]'"):
        gpu_of("H100-SXM5-80GB")


def test_cuda_13_compiles_for_gpus_since_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"jax-cuda13-plugin": "0.10.2", "nvidia-cuda-nvcc": "13.0"}
    monkeypatch.setattr(compilation, "package_version", packages.get)
    assert compilation.missing_packages() == []
    assert gpu_of("H100-SXM5-80GB") is not None
    with pytest.raises(compilation.NoCompilerError, match=r"jax-cuda12-plugin and nvidia-cuda-nvc"):
        gpu_of("V100-SXM2-16GB")


def test_every_gpu_of_the_presets_has_a_description() -> None:
    names = {machine.device.name for machine in IDEAL.values()} - {"CPU"}
    assert names == set(TARGETS)
    for machine in IDEAL.values():
        if machine.device.name in TARGETS:
            # The label counts more, or in GB.
            real = TARGETS[machine.device.name].memory
            assert 0.97 * machine.device.memory < real < 1.07 * machine.device.memory


def test_verdicts() -> None:
    gib = 2**30
    mesh = MeshCheck(name="mesh_0", planned=None, predicted=gib, compiled=3 * gib, usable=4 * gib)
    assert mesh.verdict == "fits"
    full = replace(mesh, usable=2 * 2**30)
    assert full.verdict == "does not fit: 3 GiB of 2 GiB"


@needs_gpu_compiler
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "cpu"])
def test_a_plan_for_each_gpu(planned: Callable[..., ir.Module], preset: str) -> None:
    try:
        gpu_of(PRESETS[preset].device.name)
    except compilation.NoCompilerError as error:
        pytest.skip(str(error))  # CUDA 13 does not know all of them.
    found = verify_plan(planned(f"{preset}:2x2"), processes=1)
    assert found.fits
    assert found.device == TARGETS[PRESETS[preset].device.name].name
    assert all(it.real.bytes_accessed > 0 for it in found.modules)
    assert any("all-reduce" in it.payloads for it in found.modules)


def convolved(
    kernels: list[jax.Array], moments: list[jax.Array], x: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """A training step of convolutions."""

    def loss(kernels: list[jax.Array]) -> jax.Array:
        y = x
        for kernel in kernels:
            y = jax.lax.conv_general_dilated(
                y, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            y = jax.nn.relu(y)
        return jnp.mean(y**2)

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(kernels))
    return jax.tree.map(lambda k, m: k - 0.1 * m, kernels, moments), moments


@needs_gpu_compiler
@pytest.mark.parametrize("preset", ["v100-16gb", "h100"])
@pytest.mark.parametrize("taps", [(3, 3), (1, 3, 1)])
def test_convolutions_copy_their_kernels(preset: str, taps: tuple[int, ...]) -> None:
    channels = (256, 512, 256, 512)
    kernels = [
        jax.ShapeDtypeStruct((n, n, *between), jnp.float32)
        for n, between in zip(taps, pairwise(channels), strict=False)
    ]
    x = jax.ShapeDtypeStruct((16, 14, 14, channels[0]), jnp.float32)
    step = jax.jit(convolved, donate_argnums=(0, 1)).lower(kernels, kernels, x).as_text()
    batch = f"%arg{2 * len(kernels)}: tensor<16x14x14x256xf32>"
    step = step.replace(batch, batch + ' {alpa.role = "batch", alpa.batch_dim = 0 : i64}', 1)
    plan = f"alpa{{cluster={preset}:1x1 num-micro-batches=2 num-stages=1}}"
    found = verify_plan(alpa.passes.run(step, plan), processes=1)
    both, _ = found.modules
    assert both.real.temporaries == pytest.approx(both.memory.temporaries, rel=0.25)


@needs_gpu_compiler
def test_a_gpu_has_less_memory_than_its_label(
    planned: Callable[..., ir.Module], tmp_path: Path
) -> None:
    module = planned("v100-16gb:1x2")
    (mesh,) = verify_plan(module, processes=1, cache=tmp_path).meshes
    assert mesh.fits
    assert mesh.usable == int(0.9 * 16_935_682_048)
    (mesh,) = verify_plan(module, processes=1, cache=tmp_path, usable=mesh.compiled - 1).meshes
    assert not mesh.fits
