"""The schedules that plans use: some by name, and a user's own lists, as text.

A plan keeps its schedule as text: a name, or the rows of a table (`table.py`) on one line,
separated by semicolons. Stage s lies on mesh s; schedules with several stages per mesh are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from alpa.passes.schedules.measure import peak
from alpa.passes.schedules.named import NAMES, schedule_of
from alpa.passes.schedules.one_stage import forward_only, stage_list, zb_h1
from alpa.passes.schedules.table import from_words, parse_table, to_table
from alpa.passes.schedules.verify import ScheduleError, verify
from alpa.passes.schedules.work import Work, WorkLists

PlannedName = Literal["gpipe", "1f1b", "zb-h1"]
PLANNED: tuple[PlannedName, ...] = get_args(PlannedName)


def checked(text: str) -> str:
    """A schedule as a plan keeps it.

    Args:
        text: a name, the rows of a table on one line, or the name of a file with a table.

    Raises:
        ScheduleError: plans cannot use it; for a table with its place.
    """
    if text in PLANNED:
        return text
    if text in NAMES:
        raise ScheduleError(
            f"plans cannot run {text} yet: it has several stages per mesh, or receives ahead of "
            f"need; take {_or(PLANNED)}, or a table of your own"
        )
    if ";" in text or "," in text:
        return _one_line(parse_table(text.replace(";", "\n"), check=_verify_planned))
    file = Path(text)
    if not file.is_file():
        raise ScheduleError(
            f'"{text}" is neither the name of a schedule, {_or(PLANNED)}, nor a file with a table'
        )
    return _one_line(parse_table(file.read_text(), name=text, check=_verify_planned))


def label(schedule: str) -> str:
    """How people read of a plan's schedule: its name."""
    return schedule if schedule in NAMES else "own"


def of_words(rows: Sequence[Sequence[str]]) -> str:
    """As `checked`, of lists of words such as `0F1`, one list per mesh."""
    return _one_line(from_words(rows, check=_verify_planned))


def own(schedule: str) -> WorkLists | None:
    """The lists of a user's own schedule; None for one with a name."""
    return None if schedule in NAMES else _own(schedule)


@lru_cache(maxsize=8)
def _own(schedule: str) -> WorkLists:
    return parse_table(schedule.replace(";", "\n"), check=_verify_planned)


def hides_transfers(schedule: str) -> bool:
    """Whether so many micro-batches are in flight that transfers can run beside work.

    Under 1F1B the backward of a micro-batch begins when its forward has been through all stages
    behind, and so does the next forward: with S stages, a micro-batch takes (S - 1) / S of the
    transfers between neighbours even if all of them run beside work.
    """
    return schedule == "gpipe"


def lists_of(schedule: str, meshes: int, batches: int, *, has_backward: bool = True) -> WorkLists:
    """The lists of a plan's schedule.

    Raises:
        ScheduleError: it is a user's own, for other numbers.
    """
    mine = own(schedule)
    if mine is None:
        if not has_backward:
            return forward_only(meshes, batches)
        return schedule_of(_named(schedule), meshes, batches)
    check_numbers(mine, meshes, batches)
    if mine.has_backward != has_backward:
        raise ScheduleError(
            "the schedule lists backwards, and the program has none"
            if mine.has_backward
            else "the program has a backward part, and the schedule lists none"
        )
    return mine


def check_numbers(mine: WorkLists, meshes: int | None, batches: int) -> None:
    """Raises ScheduleError unless a user's own schedule is for these numbers; None is any."""
    for what, its, wanted in (
        ("meshes", mine.num_meshes, meshes),
        ("micro-batches", mine.num_micro_batches, batches),
    ):
        if wanted not in (None, its):
            raise ScheduleError(
                f"the schedule lists {its} {what}, and the plan has {wanted}; plan with {its}, or "
                "give another schedule"
            )


@lru_cache(maxsize=4096)
def in_flight(schedule: str, batches: int, stages_to_last: int, stages: int | None = None) -> int:
    """Micro-batches whose activations a stage keeps at most, by its list.

    Args:
        schedule: of a plan.
        batches: micro-batches.
        stages_to_last: stages from this one to the last.
        stages: all stages. None: whatever their number, at most.
    """
    mine = own(schedule)
    if mine is not None:
        lists = mine.lists if stages is None else [mine.lists[stages - stages_to_last]]
        return max(map(_kept, lists))
    name = _named(schedule)
    if name != "zb-h1":
        return _kept(stage_list(name, batches, stages_to_last))
    if stages is None:
        return batches
    return _kept(zb_h1(stages, batches).lists[stages - stages_to_last])


def needs_number(schedule: str) -> bool:
    """Whether what a stage keeps in flight depends on the number of all stages, too."""
    return schedule == "zb-h1"


def splits_backward(schedule: str) -> bool:
    """Whether a plan's schedule lists the two parts of a backward."""
    mine = own(schedule)
    return schedule == "zb-h1" if mine is None else mine.splits_backward


def weights_left(schedule: WorkLists, mesh: int) -> int:
    """For how many micro-batches a mesh has weight gradients left to compute, at most."""
    left = most = 0
    for work in schedule.lists[mesh]:
        left += (work.kind == "backward-input") - (work.kind == "backward-weight")
        most = max(most, left)
    return most


def _kept(works: Sequence[Work]) -> int:
    ones = (1.0,) * (1 + max(work.stage for work in works))
    return int(peak(works, ones, ones))


def _named(schedule: str) -> PlannedName:
    """The name of a schedule that has one."""
    if schedule == "gpipe" or schedule == "1f1b" or schedule == "zb-h1":
        return schedule
    raise ScheduleError(f"plans cannot run {schedule}; take {_or(PLANNED)}")


def _or(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _one_line(schedule: WorkLists) -> str:
    return ";".join(to_table(schedule).split())


def _verify_planned(schedule: WorkLists) -> None:
    """As `verify`, and also refuses what plans cannot run."""
    verify(schedule)
    for mesh, works in enumerate(schedule.lists):
        for number, work in enumerate(works):
            if work.stage != mesh:
                raise ScheduleError(
                    f"{work} is on mesh {mesh}: in a plan, stage {work.stage} is on mesh "
                    f"{work.stage}, and each mesh has one stage",
                    (mesh, number),
                )
