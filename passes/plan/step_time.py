"""Predicts the times of a step: simulates the executor's instructions with the plan's own seconds.

A mesh runs its instructions one after the other. A transfer begins when its value exists and the
**receiving** mesh is free, and occupies that mesh until it ends; it costs the sender nothing. The
share of it that computation hides (`transfer_overlap` of a link) comes first, as soon as the value
exists, and occupies only the links into the mesh, one transfer at a time.
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
    Move,
    Run,
    Script,
    meshes_of,
    write_script,
    writes,
)
from alpa.passes.plan.versions import Key
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
    for number, it in enumerate(script.instructions):
        mesh = meshes_of(script.program, it)[-1]
        lists.setdefault((mesh, False), []).append(number)
        # What an instruction reads is made by the last one before it that writes the key. If that
        # is on the same mesh, it is in the same list.
        needs[number] = [made[it.source]] if isinstance(it, Move) and it.source in made else []
        taken[number] = it.fragment.seconds if isinstance(it, Run) else 0.0
        # A carried state that moves to its argument has no transfer.
        moved = transfers.get((it.source[0], it.target[0])) if isinstance(it, Move) else None
        if moved is not None:
            taken[number] = moved.seconds
            if moved.overlap:
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
