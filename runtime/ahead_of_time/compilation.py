"""Compiles the stages of a plan for its devices, in processes beside this one.

Executables are written, too, if they are asked for: in the format of the compile cache, so that a
process with such devices reads them instead of compiling.

JAX reads the platform and the number of virtual devices when it starts, and CUDA's plug-in prints
to standard error. So stages are compiled in processes of their own, also with one core. Equal
stages are compiled once, and results are kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import jax

from alpa.dialects import bytecode, ir, main_function, parse, separate
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.data import DeviceMesh
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.workers import Workers
from alpa.runtime.ahead_of_time.results import CompiledStage, CompiledStages, Results, Texts
from alpa.runtime.ahead_of_time.targets import TARGETS, Gpu
from alpa.runtime.compile_cache import CompileCache, machine, package_version, xla_flags
from alpa.runtime.compile_options import CompilerOptions, compile_options
from alpa.runtime.exported import Exported, module_name
from alpa.runtime.pjrt import (
    Device,
    all_devices,
    compile_module,
    gpus_to_compile_for,
    nameless_text,
)
from alpa.runtime.truth import FAST, compiled_and_truth

T = TypeVar("T")

_CUDA_12 = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
_CUDA_13 = ("jax-cuda13-plugin", "nvidia-cuda-nvcc")
"""XLA's plug-in and CUDA's compiler. Those of one version are needed."""
_FIRST_OF_CUDA_13 = (7, 5)
"""The oldest compute capability that CUDA 13 compiles for."""
_PACKAGES = ("jaxlib", *_CUDA_12, "jax-cuda12-pjrt", *_CUDA_13, "jax-cuda13-pjrt")
_NOTICE = re.compile(r"[IW]\d{4} |WARNING: All log messages")
"""Lines that XLA writes to standard error though nothing is wrong."""
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
_TEXT_ONLY: CompilerOptions = {**FAST, "xla_gpu_disable_gpuasm_optimizations": True}
"""What is left out comes after the final program: it is the same, and ready sooner."""
_LAST = 5
"""The number of lines of a process that ended to show."""
_CUDNN = "__cudnn$"
"""The beginning of the names of cuDNN's kernels in a compiled program."""


class CompilationError(RuntimeError):
    """Stages cannot be compiled for a device; the message says what to do."""


class NoCompilerError(CompilationError):
    """This machine cannot compile for the device: packages or its description are missing."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How many of the distinct stages are compiled, and how many of those came from the disk."""

    done: int
    kept: int
    distinct: int


def gpu_of(device: str) -> Gpu | None:
    """The GPU that a cluster's device is; None for virtual CPU devices.

    Raises:
        NoCompilerError: there is no description of the device, or packages are missing.
    """
    if device == "CPU":
        return None
    if device not in TARGETS:
        raise NoCompilerError(
            f"no description of {device!r} to compile for; use the name of one of "
            f"{', '.join(TARGETS)} as the cluster file's device.name"
        )
    missing = missing_packages(TARGETS[device])
    if missing:
        raise NoCompilerError(
            f"compiling for {device} needs {' and '.join(missing)}; run "
            "pip install 'alpa-mlir[gpu-aot]' (0.6 GB, no GPU needed)"
        )
    return TARGETS[device]


def gpus_of(stages: Exported) -> dict[str, Gpu | None]:
    """What the devices of each mesh of a plan are, as `gpu_of`, by the mesh's name.

    Raises:
        NoCompilerError: as `gpu_of`.
        PassError: the plan names no cluster, or one that is unknown here.
    """
    _, cluster = plan_and_any_cluster(main_function(stages.module))
    return {mesh.name: gpu_of(cluster.of(mesh.hosts).device.name) for mesh in stages.program.meshes}


def missing_packages(gpu: Gpu | None = None) -> list[str]:
    """The packages that compiling for a GPU needs and that are not installed.

    By default for one that every version of CUDA compiles for.
    """
    if gpu is not None and gpu.compute_capability < _FIRST_OF_CUDA_13:
        return _missing(_CUDA_12)
    return _missing(_CUDA_12) if _missing(_CUDA_13) else []


def _missing(packages: Sequence[str]) -> list[str]:
    return [name for name in packages if package_version(name) is None]


def compile_ahead(
    stages: Exported,
    *,
    processes: int | None = None,
    compiler_options: CompilerOptions | None = None,
    cache: Path | None = None,
    executables: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, CompiledStage]:
    """Compiles all stages for their meshes' devices, with the runtime's options; by module name.

    Args:
        stages: the plan.
        processes: at the same time; by default as many as the machine has cores.
        compiler_options: XLA's debug options by name, as for the run.
        cache: the folder of earlier results; None keeps none.
        executables: whether to keep executables there, too.
        on_progress: called after each distinct stage.

    Raises:
        CompilationError: a device is unknown, packages are missing, XLA refuses a stage, or its
            process ends.
        PassError: as `gpus_of`.
        ValueError: an option is refused.
    """
    work = partial(_compiled, folder=cache if executables else None)
    store = Results(cache, CompiledStages(executables=executables))
    return _each_stage([stages], compiler_options, work, store, processes, on_progress)[0]


def final_programs(
    plans: Sequence[Exported],
    *,
    processes: int | None = None,
    cache: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> list[dict[str, str]]:
    """Compiles all stages of several plans; for each plan XLA's final programs by module name.

    The programs are HLO text without metadata. The other arguments are those of `compile_ahead`.

    Raises:
        CompilationError, PassError: as `compile_ahead`.
    """
    store = Results(cache, Texts())
    return _each_stage(plans, _TEXT_ONLY, _final_program, store, processes, on_progress)


def _each_stage(
    plans: Sequence[Exported],
    options: CompilerOptions | None,
    work: Callable[[_Task], T],
    store: Results[T],
    processes: int | None,
    on_progress: Callable[[Progress], None],
) -> list[dict[str, T]]:
    """Does something with each distinct stage in a process; for each plan the results by name."""
    named = [_tasks(stages, options) for stages in plans]
    tasks: dict[str, _Task] = {}
    for task in (task for one in named for task in one.values()):
        equal = tasks.get(task.key)
        both = task if equal is None else replace(equal, names=(*equal.names, *task.names))
        tasks[task.key] = both
    found = {key: known for key in tasks if (known := store.read(key)) is not None}
    kept = len(found)
    on_progress(Progress(done=kept, kept=kept, distinct=len(tasks)))
    count = processes or os.cpu_count() or 1
    most = max((task.hosts * task.devices_per_host for task in tasks.values()), default=1)
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        Workers(count, environment=_environment(most), log=Path(log.name)) as workers,
    ):
        waiting = {
            key: (task, workers.submit(work, task))
            for key, task in tasks.items()
            if key not in found
        }
        for key, (task, future) in waiting.items():
            found[key] = _result(task, future, Path(log.name))
            store.write(key, found[key])
            on_progress(Progress(done=len(found), kept=kept, distinct=len(tasks)))
    return [{name: found[task.key] for name, task in one.items()} for one in named]


def _tasks(stages: Exported, options: CompilerOptions | None) -> dict[str, _Task]:
    """By the names of the modules."""
    meshes = {mesh.name: mesh for mesh in stages.program.meshes}
    gpus = gpus_of(stages)
    return {
        (name := module_name(it)): _Task.of(name, stages, meshes[it.mesh], gpus[it.mesh], options)
        for it in stages.program.fragments
    }


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Equal stages to compile; everything that determines XLA's result but their names."""

    names: tuple[str, ...]
    module: bytes
    text: str
    """the module without locations and names"""
    hosts: int
    devices_per_host: int
    gpu: Gpu | None
    options: CompilerOptions

    @classmethod
    def of(
        cls,
        name: str,
        stages: Exported,
        mesh: DeviceMesh,
        gpu: Gpu | None,
        options: CompilerOptions | None,
    ) -> _Task:
        nested, hosts = stages.nested[name], len(mesh.hosts)
        return cls(
            names=(name,),
            module=bytecode(nested),
            text=nameless_text(separate(nested)),
            hosts=hosts,
            devices_per_host=len(mesh.devices) // hosts,
            gpu=gpu,
            options=compile_options("cpu" if gpu is None else "gpu", options),
        )

    @property
    def name(self) -> str:
        """The name of the first stage."""
        return self.names[0]

    @cached_property
    def key(self) -> str:
        """A hash of everything that determines the result."""
        made_for = {
            "text": self.text,
            "hosts": self.hosts,
            "devices": self.devices_per_host,
            "gpu": None if self.gpu is None else self.gpu.description(),
            "options": sorted((name, str(value)) for name, value in self.options.items()),
            "packages": [package_version(name) for name in _PACKAGES],
            "machine": machine() if self.gpu is None else "",
            "flags": xla_flags(),
        }
        return hashlib.sha256(json.dumps(made_for).encode()).hexdigest()


def _compiled(task: _Task, folder: Path | None) -> CompiledStage:
    """In a process of its own: compiles a stage, and writes its executable to a folder."""
    devices = _devices(task)
    with _naming(task):
        compiled, truth = compiled_and_truth(
            parse(task.module), devices, name=task.name, compiler_options=task.options
        )
    if folder is None:
        return CompiledStage(truth=truth)
    if _CUDNN in compiled.hlo_text():
        return CompiledStage(truth=truth, tuned_on_device=True)
    cache = CompileCache(directory=folder)
    key = cache.key(task.text, devices, task.options, versions={})
    cache.write(key, compiled.serialised(), task.names)
    if not (folder / key.file_name).is_file():
        raise CompilationError(f"the executable of @{task.name} cannot be written to {folder}")
    return CompiledStage(truth=truth, executable=key.file_name)


def _final_program(task: _Task) -> str:
    """In a process of its own: compiles a stage for the text of its program."""
    with _naming(task):
        module, devices = parse(task.module), _devices(task)
        compiled = compile_module(
            module, devices, [], name=task.name, compiler_options=task.options
        )
    return _METADATA.sub("", compiled.hlo_text())


def _devices(task: _Task) -> Sequence[Device]:
    if task.gpu is None:
        return all_devices()[: task.hosts * task.devices_per_host]
    return gpus_to_compile_for(task.gpu.description(), task.hosts, task.devices_per_host)


@contextmanager
def _naming(task: _Task) -> Generator[None]:
    """Turns XLA's errors, which cannot be sent to another process, into a CompilationError."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ir.MLIRError) as error:
        raise CompilationError(f"XLA cannot compile @{task.name}: {error}") from None


def _result(task: _Task, future: Future[T], log: Path) -> T:
    try:
        return future.result()
    except SolverFailedError as error:
        said = without_notices(log.read_text(errors="replace"))[-_LAST:]
        reason = "".join(f"\n  {line}" for line in said)
        raise CompilationError(f"compiling @{task.name}: {error}{reason}") from error


def without_notices(said: str) -> list[str]:
    """The lines of a process's standard error that XLA did not write for information only.

    CUDA's plug-in writes such lines in every process that uses JAX, also for CPU devices.
    """
    return [line for line in said.splitlines() if not _NOTICE.match(line)]


def _environment(most_devices: int) -> dict[str, str]:
    """Variables of the environment of processes that compile for CPU devices and for GPUs."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(most_devices),
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
