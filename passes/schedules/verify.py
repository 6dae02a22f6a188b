"""Checks that a schedule can be run: complete, in order, and without deadlock.

`measure` (in `measure.py`) gives its seconds and its memory. A user's table (`table.py`) and the
lists of every generator go through the same check.
"""

from __future__ import annotations

from alpa.passes.schedules.simulate import DeadlockError, simulate
from alpa.passes.schedules.work import Work, WorkLists


class ScheduleError(ValueError):
    """A schedule cannot be run. `at` is (mesh, number in its list) of the work that is wrong."""

    def __init__(self, message: str, at: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.at = at


def verify(schedule: WorkLists) -> None:
    """Checks what a schedule must have.

    Raises:
        ScheduleError: work is listed twice or is missing, a stage is on two meshes, work comes
            before what it depends on, or meshes wait for one another.
    """
    if not any(schedule.lists):
        raise ScheduleError("the schedule has no work; list at least one forward")
    position: dict[Work, tuple[int, int]] = {}
    for mesh, works in enumerate(schedule.lists):
        for number, work in enumerate(works):
            at = mesh, number
            if work in position:
                first = position[work]
                raise ScheduleError(f"{work} is listed twice: mesh {first[0]} has it already", at)
            if work.stage < 0 or work.micro_batch < 0:
                raise ScheduleError(
                    f"{work} has a negative number; stages and micro-batches count from 0", at
                )
            position[work] = at
    _check_meshes(position)
    _check_complete(schedule, position)
    for work, (mesh, number) in position.items():
        for needed in schedule.needs(work):
            there = position[needed]
            if there[0] == mesh and there[1] > number:
                raise ScheduleError(
                    f"{work} depends on {needed}, which mesh {mesh} runs later; move {needed} "
                    f"before {work}",
                    (mesh, number),
                )
    try:
        simulate(dict(enumerate(schedule.lists)), schedule.needs, lambda _: 1.0)
    except DeadlockError as error:
        raise _deadlock(error, position) from None


def _check_meshes(position: dict[Work, tuple[int, int]]) -> None:
    """Raises for a stage on two meshes."""
    mesh_of: dict[int, int] = {}
    for work, at in position.items():
        mesh = mesh_of.setdefault(work.stage, at[0])
        if mesh != at[0]:
            raise ScheduleError(
                f"stage {work.stage} is on mesh {mesh} and on mesh {at[0]}; all work of a stage "
                "is in the list of one mesh",
                at,
            )


def _check_complete(schedule: WorkLists, position: dict[Work, tuple[int, int]]) -> None:
    """Raises unless each stage runs each micro-batch forward, and backward once or in two parts."""
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_micro_batches):
            forward = Work(stage, "forward", m)
            whole = Work(stage, "backward", m)
            parts = Work(stage, "backward-input", m), Work(stage, "backward-weight", m)
            if forward not in position:
                raise ScheduleError(
                    f"{forward} is missing: each of the {schedule.num_stages} stages runs each of "
                    f"the {schedule.num_micro_batches} micro-batches"
                )
            found = [part for part in parts if part in position]
            if whole in position and found:
                raise ScheduleError(
                    f"both {whole} and {found[0]} are listed: a backward is either whole, or is "
                    "a backward-input and a backward-weight",
                    position[found[0]],
                )
            if len(found) == 1:
                other = parts[0] if found[0] is parts[1] else parts[1]
                raise ScheduleError(
                    f"{other} is missing, the other part of {found[0]}", position[found[0]]
                )
            if schedule.has_backward and whole not in position and not found:
                raise ScheduleError(
                    f"{whole} is missing: other micro-batches or stages have a backward",
                    position[forward],
                )


def _deadlock(error: DeadlockError, position: dict[Work, tuple[int, int]]) -> ScheduleError:
    """The meshes that wait for one another in a circle."""
    heads = {mesh: (item, needed) for mesh, item, needed in error.waiting}
    mesh = next(iter(heads))
    seen: list[object] = []
    while mesh not in seen:
        seen.append(mesh)
        _, needed = heads[mesh]
        assert isinstance(needed, Work)
        mesh = position[needed][0]
    circle = seen[seen.index(mesh) :]
    text = ", ".join(f"mesh {it} waits at {heads[it][0]} for {heads[it][1]}" for it in circle)
    first = heads[circle[0]][0]
    assert isinstance(first, Work)
    return ScheduleError(f"these meshes wait for one another: {text}", position[first])
