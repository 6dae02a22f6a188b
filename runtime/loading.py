"""From a planned module to a callable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from alpa.dialects import ir, parse, parse_file
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes.analysis import planned as plans
from alpa.passes.base import PassError
from alpa.passes.export_stages import ExportStages
from alpa.runtime.local import Executable
from alpa.runtime.pjrt import CompilerOptions, Device, compile_module, separate
from alpa.runtime.placement import Placement


class LoadError(ValueError):
    """The planned module cannot be run; the message starts with the place of the reason."""


def load(
    planned: str | bytes | Path | ir.Module,
    executor: Literal["local", "ray"] = "local",
    devices: Sequence[Device] | None = None,
    *,
    compiler_options: CompilerOptions | None = None,
) -> Executable:
    """Compiles a planned module: a path, text, bytecode or a module.

    The stages are exported here unless `export-stages` has run. `devices` are the cluster's, in the
    order of `alpa.meshes`; default `jax.devices()`. `compiler_options` go to XLA, as with
    `jax.jit`.

    Raises:
        LoadError: the module is not planned, or its plan cannot be run.
        ValueError: there are fewer devices than the plan needs.
        ir.MLIRError: the module does not parse.
    """
    if executor != "local":
        raise NotImplementedError(
            f'executor="{executor}" is not built yet; executor="local" runs the same plan in one '
            "process"
        )
    module = _module(planned)
    try:
        check_planned(module)
        program = plans.read(module)
        if not all(fragment.module for fragment in program.fragments):
            # The caller's module stays as it is.
            module = separate(module.operation)
            ExportStages().run(module, lambda location, text: None)
            program = plans.read(module)
    except (CheckError, PassError) as error:
        place = str(error.location).removeprefix("loc(").removesuffix(")").replace('"', "")
        raise LoadError(f"{place}: {error.message}") from error
    placement = Placement(program=program, devices=tuple(devices or jax.devices()))
    nested = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if "sym_name" in op.attributes
    }
    stages = {}
    for fragment in program.fragments:
        name = fragment.module or fragment.name
        if name not in nested:
            raise LoadError(f"the planned module has no module @{name}; run export-stages anew")
        returned = (*fragment.outputs, *(fragment.outputs[i] for i in fragment.extra_results))
        stages[name] = compile_module(
            separate(nested[name]),
            placement.mesh_devices(fragment.mesh),
            [(program.values[v].shape, placement.shardings[v]) for v in returned],
            name=name,
            compiler_options=compiler_options,
        )
    return Executable(placement, stages)


def _module(source: str | bytes | Path | ir.Module) -> ir.Module:
    if isinstance(source, ir.Module):
        return source
    if isinstance(source, Path) or (isinstance(source, str) and "{" not in source):
        return parse_file(source)
    return parse(source)
