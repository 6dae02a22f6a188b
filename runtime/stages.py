"""Compiles the fragments of an exported module."""

from __future__ import annotations

from collections.abc import Mapping

from alpa.dialects import parse
from alpa.passes.plan.data import Program
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.exported import module_name
from alpa.runtime.pjrt import Compiled, CompilerOptions, compile_module
from alpa.runtime.placement import Placement
from alpa.runtime.progress import Show, quiet


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
