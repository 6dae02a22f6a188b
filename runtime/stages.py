"""Compiles the fragments of an exported module."""

from __future__ import annotations

from collections.abc import Mapping

from alpa.dialects import parse
from alpa.passes.plan.data import Fragment, Program
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.pjrt import Compiled, CompilerOptions, compile_module
from alpa.runtime.placement import Placement


def module_name(fragment: Fragment) -> str:
    """The name of the nested module that a fragment runs."""
    return fragment.module or fragment.name


def compile_stages(
    modules: Mapping[str, bytes],
    placement: Placement,
    *,
    compiler_options: CompilerOptions | None = None,
    cache: CompileCache | None = None,
) -> dict[str, Compiled]:
    """Compiles the fragments on the placement's meshes; returns them by module name.

    `modules` are bytecode; `compiler_options` go to XLA, as in `jax.jit`.
    """
    program: Program = placement.program
    stages: dict[str, Compiled] = {}
    for fragment in program.fragments:
        if fragment.mesh not in placement.meshes:
            continue
        name = module_name(fragment)
        returned = (*fragment.outputs, *(fragment.outputs[i] for i in fragment.extra_results))
        stages[name] = compile_module(
            parse(modules[name]),
            placement.mesh_devices(fragment.mesh),
            [(program.values[v].shape, placement.shardings[v]) for v in returned],
            name=name,
            compiler_options=compiler_options,
            cache=cache,
        )
    return stages
