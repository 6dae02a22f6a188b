"""Predicts the seconds of a step: simulates its schedule with the plan's own seconds.

Forwards and backwards run in the order of `solve/stages/schedule.py`. The transfers into a stage
are added up. When a mesh has finished its micro-batches, it runs the work of the update phase:
updates, and transfers of the values that they read or return. A mesh does one thing at a time, and
a transfer occupies the mesh that receives.

The result equals that of `runtime/simulation.py`, which simulates the executor's instructions,
unless a value skips stages. This module lets a stage receive such a value only after its
neighbour's value has arrived.
"""

from __future__ import annotations

from alpa.passes.plan.data import Program, Transfer
from alpa.passes.solve.stages.schedule import Direction, Pipeline, simulate


def step_seconds(program: Program) -> float:
    """Seconds of one step; those of fragments and transfers are the program's."""
    simulation = simulate(pipeline_of(program))
    free = {
        mesh.name: pieces[-1].end
        for mesh, pieces in zip(program.meshes, simulation.stages, strict=True)
    }
    # What the micro-batches made is there when the mesh that made it is through with them.
    made = {
        value: free[program.values[value].mesh]
        for value, part in enumerate(program.parts)
        if part in ("forward", "backward")
    }
    for step in program.steps:
        if isinstance(step, Transfer):
            runs, read, outputs = _runs_late(program, step), (step.source,), (step.target,)
            mesh = program.values[step.target].mesh
        else:
            runs, read, outputs = int(step.part == "update"), step.inputs, step.outputs
            mesh = step.mesh
        if runs:
            ready = max((made.get(value, 0.0) for value in read), default=0.0)
            free[mesh] = max(free[mesh], ready) + runs * step.seconds
            made.update(dict.fromkeys(outputs, free[mesh]))
    return max(free.values())


def pipeline_of(program: Program) -> Pipeline:
    """The pipeline of the micro-batches; updates are left out."""
    names = [mesh.name for mesh in program.meshes]
    own: dict[Direction, list[float]] = {
        kind: [0.0] * len(names) for kind in ("forward", "backward")
    }
    receive: dict[Direction, list[float]] = {kind: [0.0] * len(names) for kind in own}
    for fragment in program.fragments:
        if fragment.part != "update":
            own[fragment.part][names.index(fragment.mesh)] += fragment.seconds
    for step in program.transfers:
        kind = _received_with(program, step)
        if kind is not None:
            receive[kind][names.index(program.values[step.target].mesh)] += step.seconds
    # These wait for no neighbour: to receive is a part of their work.
    own["forward"][0] += receive["forward"][0]
    own["backward"][-1] += receive["backward"][-1]
    has_backward = any(fragment.part == "backward" for fragment in program.fragments)
    return Pipeline(
        forward=tuple(own["forward"]),
        backward=tuple(own["backward"]) if has_backward else None,
        update=(0.0,) * len(names),
        forward_transfer=tuple(receive["forward"][1:]),
        backward_transfer=tuple(receive["backward"][:-1]),
        num_micro_batches=program.num_micro_batches,
        schedule=program.plan.schedule,
    )


def _received_with(program: Program, step: Transfer) -> Direction | None:
    """The work of a micro-batch that reads a transfer first; None where none does."""
    if step.target not in program.micro_used or program.parts[step.source] is None:
        return None
    readers = {f.part for f in program.fragments if step.target in f.inputs}
    if "forward" in readers:
        return "forward"
    return "backward" if "backward" in readers else None


def _runs_late(program: Program, step: Transfer) -> int:
    """How often a transfer runs after the micro-batches: also what is only returned does."""
    if step.target in program.totals or step.target not in program.micro_used:
        return 1
    if _received_with(program, step) is not None:
        return 0
    return program.num_micro_batches if program.parts[step.source] is not None else 1
