"""Compiles the stages of a plan for its devices, in processes beside this one.

JAX reads the platform and the number of virtual devices when it starts, and CUDA's plug-in prints
to standard error. So stages are compiled in processes of their own, also with one core. Equal
stages are compiled once, and results are kept on disk.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import jax

from alpa.dialects import ir, parse
from alpa.passes.plan.data import DeviceMesh
from alpa.passes.plan.predicted_collectives import Collective
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.workers import Workers
from alpa.runtime.ahead_of_time.targets import TARGETS, Gpu
from alpa.runtime.compile_options import CompilerOptions, compile_options
from alpa.runtime.pjrt import all_devices, bytecode, gpus_to_compile_for
from alpa.runtime.stages import Exported, module_name
from alpa.runtime.truth import Truth, truth

_log = logging.getLogger(__name__)

_PACKAGES = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
_NOTICE = re.compile(r"[IW]\d{4} |WARNING: All log messages")
"""Lines that XLA writes to standard error though nothing is wrong."""
_LAST = 5
"""The number of lines of a process that ended to show."""
_NEEDED = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")


class CompilationError(RuntimeError):
    """Stages cannot be compiled for a device; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How many of the distinct stages are compiled, and how many of those came from the disk."""

    done: int
    kept: int
    distinct: int


def gpu_of(device: str) -> Gpu | None:
    """The GPU that a cluster's device is; None for virtual CPU devices.

    Raises:
        CompilationError: there is no description of the device, or packages are missing.
    """
    if device == "CPU":
        return None
    if device not in TARGETS:
        raise CompilationError(
            f"no description of {device!r} to compile for; use the name of one of "
            f"{', '.join(TARGETS)} as the cluster file's device.name"
        )
    missing = missing_packages()
    if missing:
        raise CompilationError(
            f"compiling for {device} needs {' and '.join(missing)}; run "
            "pip install 'alpa-mlir[gpu-aot]' (0.6 GB, no GPU needed)"
        )
    return TARGETS[device]


def missing_packages() -> list[str]:
    """The packages that compiling for GPUs needs and that are not installed."""
    return [name for name in _NEEDED if _version(name) is None]


def compile_ahead(
    stages: Exported,
    gpu: Gpu | None,
    *,
    processes: int | None = None,
    compiler_options: CompilerOptions | None = None,
    cache: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Truth]:
    """Compiles all stages with the runtime's options; XLA's results by module name.

    Args:
        stages: the plan.
        gpu: the device; None for virtual CPU devices.
        processes: at the same time; by default as many as the machine has cores.
        compiler_options: XLA's debug options by name, as for the run.
        cache: the folder of earlier results; None keeps none.
        on_progress: called after each distinct stage.

    Raises:
        CompilationError: XLA refuses a stage, or its process ends.
        ValueError: an option is refused.
    """
    meshes = {mesh.name: mesh for mesh in stages.program.meshes}
    options = compile_options("cpu" if gpu is None else "gpu", compiler_options)
    tasks: dict[str, list[_Task]] = {}
    for fragment in stages.program.fragments:
        task = _Task.of(module_name(fragment), stages, meshes[fragment.mesh], gpu, options)
        tasks.setdefault(task.key, []).append(task)
    store = _Results(cache)
    found = {key: known for key in tasks if (known := store.read(key)) is not None}
    kept = len(found)
    on_progress(Progress(done=kept, kept=kept, distinct=len(tasks)))
    count = processes or os.cpu_count() or 1
    most = max((len(mesh.devices) for mesh in meshes.values()), default=1)
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        Workers(count, environment=_environment(gpu, most), log=Path(log.name)) as workers,
    ):
        waiting = {
            key: (equal[0], workers.submit(_compiled, equal[0]))
            for key, equal in tasks.items()
            if key not in found
        }
        for key, (task, future) in waiting.items():
            found[key] = _result(task, future, Path(log.name))
            store.write(key, found[key])
            on_progress(Progress(done=len(found), kept=kept, distinct=len(tasks)))
    return {task.name: found[key] for key, equal in tasks.items() for task in equal}


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A stage to compile; everything that determines XLA's result but its name."""

    name: str
    module: bytes
    text: str
    """the module without locations and without the names of its stage and mesh"""
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
        options: CompilerOptions,
    ) -> _Task:
        nested, hosts = stages.nested[name], len(mesh.hosts)
        text = cast(str, nested.operation.get_asm(enable_debug_info=False))
        return cls(
            name=name,
            module=bytecode(nested),
            text=text.replace(f"@{name}", "@stage").replace(f"@{mesh.name}", "@mesh"),
            hosts=hosts,
            devices_per_host=len(mesh.devices) // hosts,
            gpu=gpu,
            options=options,
        )

    @property
    def key(self) -> str:
        """A hash of everything that determines the result."""
        made_for = {
            "text": self.text,
            "hosts": self.hosts,
            "devices": self.devices_per_host,
            "gpu": None if self.gpu is None else self.gpu.description(),
            "options": sorted((name, str(value)) for name, value in self.options.items()),
            "packages": [_version(name) for name in _PACKAGES],
        }
        return hashlib.sha256(json.dumps(made_for).encode()).hexdigest()


def _compiled(task: _Task) -> Truth:
    """In a process of its own: compiles a stage."""
    if task.gpu is None:
        devices = all_devices()[: task.hosts * task.devices_per_host]
    else:
        devices = gpus_to_compile_for(task.gpu.description(), task.hosts, task.devices_per_host)
    try:
        return truth(parse(task.module), devices, name=task.name, compiler_options=task.options)
    except (jax.errors.JaxRuntimeError, ir.MLIRError) as error:
        # Errors of jaxlib cannot be sent to another process.
        raise CompilationError(f"XLA cannot compile @{task.name}: {error}") from None


def _result(task: _Task, future: Future[Truth], log: Path) -> Truth:
    try:
        return future.result()
    except SolverFailedError as error:
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if not _NOTICE.match(line)][-_LAST:]
        reason = "".join(f"\n  {line}" for line in said)
        raise CompilationError(f"compiling @{task.name}: {error}{reason}") from error


def _environment(gpu: Gpu | None, most_devices: int) -> dict[str, str]:
    """Variables of the processes' environment."""
    if gpu is None:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(most_devices)}
    return {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class _Results:
    """Earlier results in a folder, one file each."""

    folder: Path | None

    def read(self, key: str) -> Truth | None:
        """None if there is no result, or if its file cannot be read."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        try:
            fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found: list[dict[str, Any]] = fields.pop("collectives")
            for it in found:
                it["axes"] = tuple(it["axes"])
            return Truth(collectives=tuple(Collective(**it) for it in found), **fields)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is not used: %s; the stage is compiled again", path, error)
            return None

    def write(self, key: str, result: Truth) -> None:
        """Writes a result; logs a warning if that fails."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"{key}.json"
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(asdict(result)), encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self.folder, error.strerror)
