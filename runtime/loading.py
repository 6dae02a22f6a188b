"""From a planned module to a callable."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from alpa.dialects import ir, parse, parse_file
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes.base import PassError
from alpa.passes.export_stages import ExportStages
from alpa.passes.plan.reader import read_planned
from alpa.runtime.executable import Executable
from alpa.runtime.local import LocalExecutable
from alpa.runtime.option_checks import (
    check_compiler_options,
    check_devices,
    check_kind,
    check_literal,
)
from alpa.runtime.pjrt import CompilerOptions, Device, all_devices, bytecode, separate
from alpa.runtime.placement import Placement
from alpa.runtime.stages import compile_stages, module_name
from alpa.runtime.workers.options import WorkerOptions


class LoadError(ValueError):
    """The planned module cannot be run; the message starts with the place of the reason."""


def load(
    planned: str | bytes | Path | ir.Module,
    executor: Literal["local", "ray"] = "local",
    devices: Sequence[Device] | None = None,
    *,
    compiler_options: CompilerOptions | None = None,
    workers: WorkerOptions | None = None,
    beside: Iterable[Executable] = (),
) -> Executable:
    """Compiles a planned module: a path, text, bytecode or a module.

    The stages are exported here unless `export-stages` has run. `devices` are the cluster's, in the
    order of `alpa.meshes`; default `jax.devices()`. `compiler_options` go to XLA, as with
    `jax.jit`.

    With `executor="ray"` actors on a Ray cluster run the meshes, each with its own devices;
    `workers` says how they are started. Where one of `beside`, executables on Ray, has the same
    meshes, both run in its actors, and take each other's arrays where they lie.

    Raises:
        LoadError: the module is not planned, or its plan cannot be run.
        TypeError, ValueError: an option cannot be.
        ValueError: there are fewer devices than the plan needs; with `"ray"` that is a
            `ClusterSizeError`.
        WorkerError: a worker could not start or compile.
        ir.MLIRError: the module does not parse.
    """
    check_run_options(executor, devices, workers, compiler_options)
    module = _module(planned)
    with refusing():
        check_planned(module)
        program = read_planned(module)
        if not all(fragment.module for fragment in program.fragments):
            # The caller's module stays as it is.
            module = separate(module.operation)
            ExportStages().run(module, lambda location, text: None)
            program = read_planned(module)
    nested = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if "sym_name" in op.attributes
    }
    names = [module_name(fragment) for fragment in program.fragments]
    for name in names:
        if name not in nested:
            raise LoadError(f"the planned module has no module @{name}; run export-stages anew")
    modules = {name: bytecode(nested[name]) for name in names}
    if executor == "ray":
        # Ray takes seconds to import, which the command line tools need not wait for.
        ray_executor = import_module("alpa.runtime.workers.executor")
        return ray_executor.RayExecutable(
            program, modules, workers or WorkerOptions(), compiler_options, beside
        )
    placement = Placement(program=program, devices=tuple(devices or all_devices()))
    stages = compile_stages(modules, placement, compiler_options=compiler_options)
    return LocalExecutable(placement, stages)


def check_run_options(
    executor: Any,
    devices: Sequence[Device] | None,
    workers: Any,
    compiler_options: Any,
) -> None:
    """Raises TypeError, ValueError where one of these options of `load` cannot be."""
    check_literal("executor", executor, Literal["local", "ray"])
    check_devices(devices)
    check_kind("workers", workers, WorkerOptions, type(None))
    check_compiler_options(compiler_options)


@contextmanager
def refusing() -> Generator[None]:
    """What a check finds wrong with a plan becomes a LoadError."""
    try:
        yield
    except (CheckError, PassError) as error:
        place = str(error.location).removeprefix("loc(").removesuffix(")").replace('"', "")
        raise LoadError(f"{place}: {error.message}") from error


def _module(source: str | bytes | Path | ir.Module) -> ir.Module:
    if isinstance(source, ir.Module):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and "{" not in source):
        return parse_file(source)
    return parse(source)
