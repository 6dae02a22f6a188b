"""The stages of a planned program, and the order in which they run its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby

from alpa.passes.plan.data import Fragment, Program
from alpa.passes.schedules.planned import check_numbers, forwards_of, label, lists_of, own
from alpa.passes.schedules.simulate import simulate
from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.schedules.work import Kind, Work, WorkLists

Stage = dict[Kind, tuple[Fragment, ...]]
"""Fragments of one mesh that a stage of the schedule runs for each micro-batch."""
_Place = tuple[str, int | None]
"""A mesh and the number of one of its stages."""


def stages_of(program: Program) -> list[Stage]:
    """The forwards by the number of their stage, each with the backward of its stage.

    Without numbers, forwards are in program order, and backwards from the last stage to the first.
    A forward without a backward, or a backward without a forward, is a stage of its own. Where both
    are merged (`merge-fragments`), they run in the place of the forward. A schedule that splits
    backwards runs the two parts of `split-backward`; what is not split runs as the first part.
    """
    fragments = program.fragments
    forward = _in_order(_by_stage(f for f in fragments if f.runs_forward))
    backward = _in_order(_by_stage(f for f in fragments if f.part == "backward")[::-1])
    places = [[_place(group[0]) for group in part] for part in (forward, backward)]
    backward = [tuple(f for f in group if not f.runs_forward) for group in backward]
    stages: list[Stage] = []
    for tag, f0, f1, b0, b1 in SequenceMatcher(None, *places, autojunk=False).get_opcodes():
        if tag == "equal":
            both = zip(forward[f0:f1], backward[b0:b1], strict=True)
            stages.extend(_stage(f, b) for f, b in both)
        else:
            stages.extend(_stage(f, ()) for f in forward[f0:f1])
            stages.extend(_stage((), b) for b in backward[b0:b1])
    return stages


def _stage(forward: tuple[Fragment, ...], backward: tuple[Fragment, ...]) -> Stage:
    return {
        "forward": forward,
        "backward": backward,
        "backward-input": tuple(f for f in backward if f.half != "weight"),
        "backward-weight": tuple(f for f in backward if f.half == "weight"),
    }


def schedule_of_stages(program: Program, stages: Sequence[Stage]) -> WorkLists:
    """The lists of the stages. Of a schedule of one stage per mesh, each is as if on a mesh of its
    own.

    Raises:
        ScheduleError: the schedule is for other numbers of stages or micro-batches, or has stages
            on other meshes.
    """
    has_backward = any(stage["backward"] for stage in stages)
    mine = own(program.plan.schedule)
    if mine is not None and len(stages) == 1 and not has_backward:
        # The parts of one stage are one fragment, which runs where its forward part is listed.
        check_numbers(mine, 1, program.num_micro_batches)
        return forwards_of(mine)
    schedule = lists_of(
        program.plan.schedule,
        len(stages),
        program.num_micro_batches,
        has_backward=has_backward,
    )
    if schedule.num_meshes < len(stages):
        names = [mesh.name for mesh in program.meshes]
        for number, stage in enumerate(stages):
            (*_, fragment) = (*stage["backward"], *stage["forward"])
            mesh = schedule.mesh_of[number]
            if names[mesh : mesh + 1] != [fragment.mesh]:
                raise ScheduleError(
                    f"stage {number} is on {fragment.mesh}, and {label(program.plan.schedule)} has "
                    f"it on mesh {mesh} of {schedule.num_meshes}"
                )
    return schedule


def read_by(fragments: Sequence[Fragment]) -> list[int]:
    """The values that fragments read and that other stages or the caller produce."""
    made = {value for fragment in fragments for value in fragment.outputs}
    inputs = dict.fromkeys(value for fragment in fragments for value in fragment.inputs)
    return [value for value in inputs if value not in made]


def rounds(schedule: WorkLists, reads: Callable[[Work], Iterable[Work]]) -> Iterator[list[Work]]:
    """The work of all stages, in the order of a schedule if all work takes equally long.

    In each round, every stage that can go on does its next work. A stage waits for its neighbour
    even if it reads nothing from it: otherwise it could exceed the schedule's micro-batches in
    flight.

    Args:
        reads: the work whose results an item reads.

    Raises:
        DeadlockError: stages wait for one another.
    """
    spans = simulate(
        dict(enumerate(schedule.lists)),
        lambda work: [*schedule.needs(work), *reads(work)],
        lambda _: 1.0,
    )
    in_time = sorted(spans, key=lambda work: (spans[work].start, work.stage))
    for _, together in groupby(in_time, key=lambda work: spans[work].start):
        yield [*together]


def _by_stage(fragments: Iterable[Fragment]) -> list[tuple[Fragment, ...]]:
    """The fragments of each stage, in the order of their first ones.

    Those without the number of a stage are one if they follow one another on a mesh. Those with a
    number can be apart: a second part of a backward waits for its update (`merge-fragments`).
    """
    groups: list[list[Fragment]] = []
    numbered: dict[_Place, list[Fragment]] = {}
    for fragment in fragments:
        place = _place(fragment)
        group = numbered.get(place)
        if group is None and groups and _place(groups[-1][0]) == place:
            group = groups[-1]
        if group is None:
            group = []
            groups.append(group)
            if fragment.stage is not None:
                numbered[place] = group
        group.append(fragment)
    return [tuple(group) for group in groups]


def _in_order(groups: list[tuple[Fragment, ...]]) -> list[tuple[Fragment, ...]]:
    """By the numbers of the stages, if all have one: a stage that reads nothing of the one before
    may stand in front of it."""
    if any(group[0].stage is None for group in groups):
        return groups
    return sorted(groups, key=lambda group: group[0].stage or 0)


def _place(fragment: Fragment) -> _Place:
    return fragment.mesh, fragment.stage
