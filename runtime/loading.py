"""Loads a planned module as a callable."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from alpa.dialects import bytecode, ir, parse, parse_file
from alpa.dialects.checks import CheckError
from alpa.passes.base import PassError, check_kind
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.executable import Executable
from alpa.runtime.exported import exported, module_name
from alpa.runtime.interrupts import imported
from alpa.runtime.local import LocalExecutable
from alpa.runtime.option_checks import (
    check_compiler_options,
    check_devices,
    check_folders,
    check_literal,
)
from alpa.runtime.pjrt import CompilerOptions, Device, all_devices
from alpa.runtime.placement import Placement
from alpa.runtime.progress import Show, progress
from alpa.runtime.stages import compile_stages
from alpa.runtime.workers.options import WorkerOptions

Folders = str | Path | Sequence[str | Path]


class LoadError(ValueError):
    """The planned module cannot be run. The message starts with the place of the problem."""


def load(
    planned: str | bytes | Path | ir.Module,
    executor: Literal["local", "ray"] = "local",
    devices: Sequence[Device] | None = None,
    *,
    compiler_options: CompilerOptions | None = None,
    workers: WorkerOptions | None = None,
    executables: Folders = (),
    beside: Iterable[Executable] = (),
    on_progress: Callable[[str], None] | None = None,
) -> Executable:
    """Compiles a planned module, given as a path, text, bytecode or a module.

    `load` exports the stages unless `export-stages` has run. `devices` are the cluster's in the
    order of `alpa.meshes`; the default is `jax.devices()`. `compiler_options` go to XLA, as in
    `jax.jit`.

    `executables` are folders that `alpa-plan --export` wrote. A stage that was compiled there for
    these devices, versions and options is read. Any other is compiled, and a warning says why.
    Executables run unchecked: name only folders of your own.

    With `executor="ray"`, actors on a Ray cluster run the meshes, each with its own devices, and
    `workers` configures them. Each host reads `executables` under the same names. `beside` lists
    executables on Ray. If one of them has the same meshes, both run in its actors and read each
    other's arrays there.

    A terminal shows what is compiled, and which workers are waited for. `on_progress` hears it
    instead.

    Raises:
        LoadError: the module is not planned, or its plan cannot be run.
        TypeError, ValueError: an option is invalid.
        ValueError: there are fewer devices than the plan needs; with `"ray"` this is a
            `ClusterSizeError`.
        WorkerError: a worker could not start or compile.
        UnsafeCacheError: other users can write to a folder of executables.
        ir.MLIRError: the module does not parse.
    """
    check_run_options(executor, devices, workers, compiler_options)
    check_kind("on_progress", on_progress, Callable, type(None))
    folders = check_folders("executables", executables)
    module = _module(planned)
    with progress("load") if on_progress is None else nullcontext(_heard(on_progress)) as show:
        return _loaded(module, executor, devices, compiler_options, workers, folders, beside, show)


def _loaded(
    module: ir.Module,
    executor: Literal["local", "ray"],
    devices: Sequence[Device] | None,
    compiler_options: CompilerOptions | None,
    workers: WorkerOptions | None,
    folders: tuple[Path, ...],
    beside: Iterable[Executable],
    show: Show,
) -> Executable:
    with refusing():
        stages = exported(module)
    program = stages.program
    names = [module_name(fragment) for fragment in program.fragments]
    modules = {name: bytecode(stages.nested[name]) for name in names}
    if executor == "ray":
        # Importing Ray takes seconds, and commands without Ray must not wait for it.
        ray_executor = imported("alpa.runtime.workers.executor")
        return ray_executor.RayExecutable(
            program, modules, workers or WorkerOptions(), compiler_options, beside, folders, show
        )
    placement = Placement(program=program, devices=tuple(devices or all_devices()))
    cache = CompileCache(exported=folders) if folders else None
    compiled = compile_stages(
        modules, placement, compiler_options=compiler_options, cache=cache, show=show
    )
    return LocalExecutable(placement, compiled)


def _heard(hear: Callable[[str], None]) -> Show:
    """Tells a caller what is being done, without the numbers."""
    return lambda what, done=0, total=0: hear(what)


def check_run_options(
    executor: Any,
    devices: Sequence[Device] | None,
    workers: Any,
    compiler_options: Any,
) -> None:
    """Raises TypeError or ValueError if one of these options of `load` is invalid."""
    check_literal("executor", executor, Literal["local", "ray"])
    check_devices(devices)
    check_kind("workers", workers, WorkerOptions, type(None))
    check_compiler_options(compiler_options)


@contextmanager
def refusing() -> Generator[None]:
    """Turns the errors of a plan's checks into a LoadError."""
    try:
        yield
    except (CheckError, PassError) as error:
        place = str(error.location).removeprefix("loc(").removesuffix(")").replace('"', "")
        raise LoadError(f"{place}: {error.message}") from error


def _module(source: str | bytes | Path | ir.Module) -> ir.Module:
    check_kind("planned", source, str, bytes, Path, ir.Module)
    if isinstance(source, ir.Module):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and "{" not in source):
        return parse_file(source)
    return parse(source)
