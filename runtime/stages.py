"""Compiles the fragments of an exported module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa.dialects import ir, main_function, parse, separate
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes.export_stages import ExportStages
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.reader import read_planned
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.pjrt import Compiled, CompilerOptions, compile_module
from alpa.runtime.placement import Placement
from alpa.runtime.progress import Show, quiet


def module_name(fragment: Fragment) -> str:
    """The name of the nested module that a fragment runs."""
    return fragment.module or fragment.name


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A planned module after `export-stages`, its program, and the modules for XLA by name."""

    module: ir.Module
    program: Program
    nested: Mapping[str, ir.OpView]


def exported(module: ir.Module) -> Exported:
    """Reads a planned module. If `export-stages` has not run, it runs on a copy.

    Raises:
        CheckError, PassError: the module is not planned, or its plan cannot be exported.
    """
    check_planned(module)
    program = read_planned(module)
    if not all(fragment.module for fragment in program.fragments):
        module = separate(module.operation)
        ExportStages().run(module, lambda location, text: None)
        program = read_planned(module)
    nested = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if "sym_name" in op.attributes
    }
    for fragment in program.fragments:
        if module_name(fragment) not in nested:
            raise CheckError(
                main_function(module).location,
                f"the planned module has no module @{module_name(fragment)}; run export-stages "
                "again",
            )
    return Exported(module=module, program=program, nested=nested)


def compile_stages(
    modules: Mapping[str, bytes],
    placement: Placement,
    *,
    compiler_options: CompilerOptions | None = None,
    cache: CompileCache | None = None,
    executables: Mapping[str, bytes] | None = None,
    show: Show = quiet,
) -> dict[str, Compiled]:
    """Compiles the fragments on the placement's meshes; returns them by module name.

    `modules` are bytecode; `compiler_options` go to XLA, as in `jax.jit`. `executables` are those
    that another process has compiled; they are loaded as they are.
    """
    program: Program = placement.program
    stages: dict[str, Compiled] = {}
    mine = [fragment for fragment in program.fragments if fragment.mesh in placement.meshes]
    for number, fragment in enumerate(mine):
        name = module_name(fragment)
        show(f"compile {name} ({number + 1} of {len(mine)})", number, len(mine))
        returned = (*fragment.outputs, *(fragment.outputs[i] for i in fragment.extra_results))
        stages[name] = compile_module(
            parse(modules[name]),
            placement.mesh_devices(fragment.mesh),
            [(program.values[v].shape, placement.shardings[v]) for v in returned],
            name=name,
            compiler_options=compiler_options,
            cache=cache,
            executable=None if executables is None else executables[name],
        )
    return stages
