"""What a cut makes of a program: the stages, their meshes, and what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from alpa.dialects.plan import MeshAssignment
from alpa.passes.base import MeshOverHostsError
from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.planned import in_flight, lists_of, splits_backward
from alpa.passes.schedules.split_memory import fullest, held_at
from alpa.passes.schedules.work import WorkLists
from alpa.passes.solve.stages.problem import Stage
from alpa.passes.stages.candidates import Candidate
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.search import Cut

WITHIN = "meshes-over-hosts=false keeps each mesh inside one host"


def check_hosts(program: Clustered, mesh: str, hosts: Sequence[int], over_hosts: bool) -> None:
    """Raises MeshOverHostsError for a given mesh that may not span hosts."""
    if len(hosts) > 1 and not over_hosts:
        raise MeshOverHostsError(
            program.function,
            f"{WITHIN}, and the given mesh {mesh} spans {len(hosts)} hosts; plan for a cluster of "
            "one host, or give other meshes",
        )


def schedule_on(program: Clustered, stages: int) -> WorkLists:
    """The lists of the program's schedule for so many stages. Raises ScheduleError."""
    plan = program.plan
    return lists_of(plan.schedule, stages, plan.num_micro_batches, has_backward=program.trains)


def fastest(program: Clustered, cut: Cut) -> Cut:
    """Of a cut and the others that were found with it, the one whose simulated schedule takes the
    least time, with that time."""
    every = (replace(it, seconds=_simulated_seconds(program, it)) for it in (cut, *cut.others))
    return min(every, key=lambda it: it.seconds)


def _simulated_seconds(program: Clustered, cut: Cut) -> float:
    """Seconds of a step of a cut's stages under the program's schedule (`schedules/measure.py`).

    Half of a stage's transfers come from either neighbour.
    """
    schedule = schedule_on(program, len(cut.stages))
    seconds = [
        found.seconds_of(stage.first, stage.last)
        for stage, found in zip(cut.stages, cut.candidates, strict=True)
    ]
    moved = [max(a - sum(t), 0.0) for a, t in zip(cut.each, seconds, strict=True)]
    half, nothing, last = [c / 2 for c in moved], (0.0,) * len(seconds), len(seconds) - 1
    forward, first, second = zip(*seconds, strict=True)
    costs = Costs(
        forward=forward,
        backward_input=first,
        backward_weight=second,
        forward_transfer=(0.0, *half[1:last], *moved[last:]) if last else nothing,
        backward_transfer=(*moved[:1], *half[1:last], 0.0) if last else nothing,
        update=_updates(program, cut, schedule),
        held=nothing,
        kept=nothing,
        hidden=tuple(b / c if c else 0.0 for b, c in zip(cut.beside, moved, strict=True)),
    )
    return measure(schedule, costs).seconds


def _updates(program: Clustered, cut: Cut, schedule: WorkLists) -> tuple[float, ...]:
    """Seconds of each stage's update.

    What comes from other stages of its mesh is there already. A state that stages of two meshes
    read comes back from its update after its gradient has gone there.
    """
    layers = [range(stage.first, stage.last + 1) for stage in cut.stages]
    updates = list(cut.updates)

    def seconds(source: int, target: int) -> float:
        at = program.left[cut.kinds[target]], *cut.candidates[target].submesh[:2]
        return program.boundary.once_between(layers[source], layers[target], *at)

    for s, r in permutations(range(len(layers)), 2):
        forth, back = seconds(s, r), seconds(r, s)
        if schedule.mesh_of[s] == schedule.mesh_of[r]:
            updates[s] -= back
        elif forth and back:
            updates[s] += forth
    return tuple(max(it, 0.0) for it in updates)


def stages_of(
    program: Clustered,
    cut: Cut,
    meshes: list[MeshAssignment],
    numbers: Sequence[int],
    mesh_of: Mapping[int, int] | None = None,
) -> Stages:
    """The stages of a cut, with the program's own shardings on every mesh.

    Args:
        program: the layers.
        cut: the stages.
        meshes: theirs.
        numbers: of the stages.
        mesh_of: the mesh of each number; None: that of this number.
    """
    given = program.given
    count = len(mesh_of or meshes)
    on_mesh: list[dict[int, tuple[Stage, Candidate]]] = [{} for _ in meshes]
    layer_stage: dict[int, int] = {}
    again: set[int] = set()
    for number, stage, found in zip(numbers, cut.stages, cut.candidates, strict=True):
        on_mesh[mesh_of[number] if mesh_of else number][number] = stage, found
        layer_stage |= dict.fromkeys(range(stage.first, stage.last + 1), number)
        again.update(found.rematerialised(stage.first, stage.last))
    peaks = (peak_bytes(program, count, mesh, its) for mesh, its in enumerate(on_mesh))
    return Stages(
        layer_stage=layer_stage,
        meshes=meshes,
        mesh_of_stage=mesh_of or {},
        seconds=cut.seconds,
        peak_bytes=tuple(map(int, peaks)),
        given=given,
        shardings={} if given is None else given.on([mesh.name for mesh in meshes]),
        rematerialised=program.always_rematerialised | again,
        dropped=cut.dropped,
    )


def peak_bytes(
    program: Clustered, count: int, mesh: int, stages: Mapping[int, tuple[Stage, Candidate]]
) -> float:
    """What a device of a mesh holds at most, by the costs of its stages.

    Args:
        program: the layers.
        count: the stages on all meshes.
        mesh: its number.
        stages: those of the mesh by their numbers.
    """
    plan = program.plan
    peak = sum(float(it.fixed_bytes[s.first, s.last]) for s, it in stages.values())
    if program.trains and splits_backward(plan.schedule):
        its = {n: it.split_bytes.at(s.first, s.last) for n, (s, it) in stages.items()}
        return peak + held_at(fullest(plan.schedule, count, plan.num_micro_batches, mesh, its), its)
    for number, (s, it) in stages.items():
        batches = in_flight(plan.schedule, plan.num_micro_batches, count - number, count)
        peak += batches * float(it.activation_bytes[s.first, s.last])
    return peak
