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
from alpa.passes.solve.stages.schedule import Direction, Times, simulate


def step_seconds(program: Program) -> float:
    """Seconds of one step; those of fragments and transfers are the program's."""
    times = micro_batch_times(program)
    number = {mesh.name: n for n, mesh in enumerate(program.meshes)}
    # What the micro-batches made is there when the mesh that made it is through with them.
    for value, part in enumerate(program.parts):
        if part in ("forward", "backward"):
            times.made[value] = times.free[number[program.values[value].mesh]]
    for step in program.steps:
        if isinstance(step, Transfer):
            runs, read, outputs = _runs_late(program, step), (step.source,), (step.target,)
            mesh = program.values[step.target].mesh
        else:
            runs, read, outputs = int(step.part == "update"), step.inputs, step.outputs
            mesh = step.mesh
        if runs:
            times.run(number[mesh], runs * step.seconds, read, outputs)
    return max(times.free.values())


def micro_batch_times(program: Program) -> Times:
    """Times of the micro-batches, by the numbers of the meshes; updates are left out."""
    number = {mesh.name: n for n, mesh in enumerate(program.meshes)}
    # For each mesh what it receives, and what it does itself.
    work: dict[Direction, list[list[float]]] = {
        "forward": [[0.0, 0.0] for _ in number],
        "backward": [[0.0, 0.0] for _ in number],
    }
    for fragment in program.fragments:
        if fragment.part != "update":
            work[fragment.part][number[fragment.mesh]][1] += fragment.seconds
    for step in program.transfers:
        kind = _received_with(program, step)
        if kind is not None:
            work[kind][number[program.values[step.target].mesh]][0] += step.seconds
    has_backward = any(fragment.part == "backward" for fragment in program.fragments)
    return simulate(
        program.plan.schedule,
        program.num_micro_batches,
        work["forward"],
        work["backward"] if has_backward else None,
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
