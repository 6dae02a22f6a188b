"""Versions of values compared with the instructions that the runtime runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from alpa import passes
from alpa.dialects import body, func, ir, main_function, parse
from alpa.dialects.plan import Plan, Schedule
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import write_script
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.versions import Key
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.tools import zoo

BATCHES = 6
CLUSTER = "cpu:2x4"


@cache
def layers() -> str:
    """Layers that read from layers other than their neighbours."""
    text = zoo.get("unet-tiny", optimizer="sgd").lower(2)
    return str(passes.run(text, "simplify-trivial-ops,layer-cluster{num-layers=4}"))


@cache
def cut(schedule: str = "1f1b", cluster: str = CLUSTER) -> str:
    """A stage for each layer."""
    options = f"cluster={cluster} num-stages=4 num-micro-batches={BATCHES} schedule={schedule}"
    return str(passes.run(layers(), f"stage-mesh-partition{{{options}}}"))


def values_of(function: func.FuncOp) -> list[ir.Value]:
    """By their numbers in the program."""
    block = body(function)
    return [*block.arguments, *(result for op in block.operations for result in op.results)]


def most_versions(program: Program, mesh: str) -> dict[int, int]:
    """Of each value on a mesh, while the mesh runs its list."""
    live: dict[int, set[Key]] = {}
    most: dict[int, int] = {}
    for instruction in write_script(program).on(mesh):
        made = getattr(instruction, "outputs", None) or [getattr(instruction, "target", None)]
        for key in made:
            if key is not None and program.values[key[0]].mesh == mesh:
                live.setdefault(key[0], set()).add(key)
                most[key[0]] = max(most.get(key[0], 0), len(live[key[0]]))
        for key in instruction.free:
            if program.values[key[0]].mesh == mesh:
                live.get(key[0], set()).discard(key)
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_versions_are_those_of_the_instructions_and_one_that_is_on_its_way(
    schedule: Schedule, pose: Callable[[ir.Module], list[MeshProblem]]
) -> None:
    module = parse(cut().replace('"1f1b"', f'"{schedule}"'))
    function = main_function(module)
    plan = Plan.read(function)
    assert plan is not None
    assert plan.schedule == schedule
    program = read_planned(module)
    values = values_of(function)
    assert len(values) == len(program.values)
    # What is sent may not have left yet when the next one is made; and under 1f1b a stage begins a
    # backward in every other round only, so that fewer are waiting.
    check_versions(program, values, pose(module), 1 if schedule == "gpipe" else 2)


@pytest.mark.parametrize("schedule", ["eager-1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_versions_of_schedules_whose_lists_are_counted(
    schedule: Schedule, pose: Callable[[ir.Module], list[MeshProblem]]
) -> None:
    module = parse(cut(schedule, "cpu:1x4" if schedule == "eager-1f1b" else "cpu:1x2"))
    program, function = read_planned(module), main_function(module)
    check_versions(program, values_of(function), pose(module), 2)


def check_versions(
    program: Program, values: list[ir.Value], meshes: list[MeshProblem], more: int
) -> None:
    """Compares the versions of all values with those that the instructions make."""
    results = {result.value for result in program.results}
    seen: set[str | None] = set()
    for mesh in meshes:
        for number, most in most_versions(program, mesh.name).items():
            made = program.parts[number]
            if made in ("forward", "backward") and number not in program.totals | results:
                counted = mesh.versions.of(values[number])
                assert most <= counted <= most + more
                seen.add(made)
    assert seen == {"forward", "backward"}
