"""Predicts the times of a step: simulates the executor's instructions with the plan's own seconds.

A mesh runs its instructions one after the other. A transfer begins when its value exists and the
**receiving** mesh is free, and occupies that mesh until it ends; it costs the sender nothing. The
share of it that computation hides (`transfer_overlap` of a link) comes first, as soon as the value
exists, and occupies only the links into the mesh. Under a schedule that receives ahead, all of it
runs beside the mesh's work, one transfer at a time. It begins when the work that many items before
its first reader has ended: a buffer is free then.
Additions of results take no time.

`seconds_in_turns` is the sum of all work instead, for an executor whose meshes take turns, at the
rates of devices whose neighbours wait.
`with_call` adds the call of the step itself, in which arguments are placed and results returned.
"""

from __future__ import annotations

from dataclasses import dataclass

from alpa.passes.cost.cluster import AnyCluster, Cluster
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import (
    Instruction,
    Key,
    Move,
    Run,
    Script,
    meshes_of,
    reads,
    write_script,
    writes,
)
from alpa.passes.schedules import simulate as schedules


@dataclass(frozen=True, kw_only=True)
class Event:
    """An instruction in time, on the mesh that it occupies; seconds from the start of the step."""

    instruction: Instruction
    mesh: str
    start: float
    end: float


def step_seconds(program: Program) -> float:
    """Seconds of one step."""
    return max((event.end for event in simulate(write_script(program))), default=0.0)


def with_call(seconds: float, program: Program, cluster: AnyCluster) -> float:
    """Seconds of a step with those of its call: its arguments and results are on all meshes."""
    found = seconds + max(kind.device.step_call.start for kind in cluster.kinds)
    for mesh in program.meshes:
        its = cluster.of(mesh.hosts)
        call = its.device.step_call
        here = [*program.arguments, *program.results]
        number = sum(program.values[it.value].mesh == mesh.name for it in here)
        devices = min(len(mesh.devices), its.devices_per_host)
        found += call.seconds(float(number), devices) - call.start
    return found


def seconds_in_turns(program: Program, cluster: Cluster) -> float:
    """Seconds of one step whose meshes take turns, as in the local executor on CPU devices.

    A mesh computes faster while the others wait, if the devices of a host share its cores.
    """
    devices = {mesh.name: len(mesh.devices) // len(mesh.hosts) for mesh in program.meshes}
    found = 0.0
    for event in simulate(write_script(program)):
        share = 1.0
        if isinstance(event.instruction, Run):
            share = cluster.device.share_alone(devices[event.mesh])
        found += share * (event.end - event.start)
    return found


def simulate(script: Script) -> list[Event]:
    """The instructions of one step in time; those of a mesh are in its order. A transfer is there
    while it occupies the mesh."""
    transfers = {(it.source, it.target): it for it in script.program.transfers}
    lists: dict[tuple[str, bool], list[int]] = {}
    """of meshes, and of the links into them (True)"""
    needs: dict[int, list[int]] = {}
    taken: dict[int, float] = {}
    made: dict[Key, int] = {}
    before = _before_moves(script)
    for number, it in enumerate(script.instructions):
        mesh, is_ahead = meshes_of(script.program, it)[-1], number in before
        lists.setdefault((mesh, is_ahead), []).append(number)
        # What an instruction reads is made by the last one before it that writes the key.
        needs[number] = [*(made[key] for key in reads(it) if key in made), *before.get(number, ())]
        taken[number] = it.fragment.seconds if isinstance(it, Run) else 0.0
        # A carried state that moves to its argument has no transfer.
        moved = transfers.get((it.source[0], it.target[0])) if isinstance(it, Move) else None
        if moved is not None:
            taken[number] = moved.seconds
            if moved.overlap and not is_ahead:
                hidden = ~number
                taken[hidden] = moved.overlap * moved.seconds
                taken[number] -= taken[hidden]
                lists.setdefault((mesh, True), []).append(hidden)
                needs[hidden], needs[number] = needs[number], [hidden]
        made.update(dict.fromkeys(writes(it), number))
    spans = schedules.simulate(lists, needs.__getitem__, taken.__getitem__)
    mesh_of = {number: mesh for (mesh, _), them in lists.items() for number in them}
    return [
        Event(
            instruction=it, mesh=mesh_of[number], start=spans[number].start, end=spans[number].end
        )
        for number, it in enumerate(script.instructions)
    ]


def _before_moves(script: Script) -> dict[int, tuple[int, ...]]:
    """Of each move that runs beside the work of the mesh that receives, the run whose end frees its
    buffer, if there is one; by their numbers. Nothing where the schedule does not receive ahead."""
    found: dict[int, tuple[int, ...]] = {}
    if not script.receives_ahead:
        return found
    runs: dict[str, list[int]] = {}
    moved: dict[Key, int] = {}
    for number, it in enumerate(script.instructions):
        if isinstance(it, Move) and len(meshes_of(script.program, it)) > 1:
            moved[it.target] = number
            found[number] = ()
        elif isinstance(it, Run):
            mine = runs.setdefault(it.fragment.mesh, [])
            for key in it.inputs:
                if key in moved:
                    found[moved.pop(key)] = tuple(mine[: -script.receives_ahead][-1:])
            mine.append(number)
    return found
