"""The schedules that plans use: those with a name, and a user's own lists, as text.

A plan keeps its schedule as text: a name, or the rows of a table (`table.py`) on one line,
separated by semicolons. `interleaved-1f1b:3` has three stages per mesh, `interleaved-1f1b` two. All
meshes of a plan have equally many stages, and stage d is on mesh d for the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from alpa.passes.schedules.measure import Costs, measure, peak
from alpa.passes.schedules.named import NAMES, Name, schedule_of, stages_per_mesh
from alpa.passes.schedules.one_stage import forward_only, stage_list
from alpa.passes.schedules.table import from_words, parse_table, table_text, to_table
from alpa.passes.schedules.verify import ScheduleError, verify
from alpa.passes.schedules.work import Work, WorkLists

_CHUNKS = re.compile(r"interleaved-1f1b:([2-9]|[1-9]\d+)")
"""With one stage per mesh it would be 1F1B."""
T_SCHEDULES = ("gpipe", "1f1b")
"""Schedules whose steps T estimates, the objective of the stage DP (`solve/stages/problem.py`)."""
OTHERS = (*(name for name in NAMES if name != "1f1b"), "interleaved-1f1b:4")
"""What is searched beside 1F1B, if no schedule is asked for."""
_BY_STAGES_BEHIND = ("gpipe", "1f1b", "eager-1f1b")
"""Schedules under which what a stage keeps depends on the stages behind it alone."""
_FILL: dict[Name, float] = {"eager-1f1b": 1.0, "zb-h1": 1 / 3, "zb-v": 1 / 6, "dualpipe-v": 1 / 6}
"""`fill_share` of schedules for which it depends neither on the number of meshes nor on that of
micro-batches, if these are many. That of interleaved 1F1B is 1 / v for v stages on each mesh."""
TERAPIPE = "terapipe"
"""The name by which users ask for GPipe with token slices. No plan keeps it."""


def checked(text: str) -> str:
    """A schedule as a plan keeps it.

    Args:
        text: a name, the rows of a table on one line, or the name of a file with a table.

    Raises:
        ScheduleError: plans cannot use it, or the file cannot be read; for a table with its place.
    """
    if _has_name(text):
        return text
    if ";" in text or "," in text:
        return _one_line(parse_table(text.replace(";", "\n"), check=_verify_planned))
    file = Path(text)
    if not file.is_file():
        raise ScheduleError(
            f'"{text}" is neither the name of a schedule, {_or(NAMES)}, nor a file with a table; '
            f"the planner also takes auto and {TERAPIPE}"
        )
    try:
        rows = table_text(file)
    except OSError as error:
        raise ScheduleError(f"{text}: cannot be read: {error.strerror}") from error
    return _one_line(parse_table(rows, name=text, check=_verify_planned))


def label(schedule: str) -> str:
    """How people read of a plan's schedule: its name."""
    return schedule if _has_name(schedule) else "own"


def of_words(rows: Sequence[Sequence[str]]) -> str:
    """As `checked`, of lists of words such as `0F1`, one list per mesh."""
    return _one_line(from_words(rows, check=_verify_planned))


def own(schedule: str) -> WorkLists | None:
    """The lists of a user's own schedule; None for one with a name."""
    return None if _has_name(schedule) else _own(schedule)


@lru_cache(maxsize=8)
def _own(schedule: str) -> WorkLists:
    return parse_table(schedule.replace(";", "\n"), check=_verify_planned)


def hidden_share(schedule: str, overlap: float) -> float:
    """The share of a transfer that runs beside work, over a link with this `transfer_overlap`.

    Under 1F1B the backward of a micro-batch begins when its forward has been through all stages
    behind, and so does the next forward: with S stages, a micro-batch takes (S - 1) / S of the
    transfers between neighbours even if all of them run beside work. The search counts them in
    full. Eager 1F1B keeps enough micro-batches in flight to hide all of them.
    """
    return overlap if schedule in ("gpipe", "eager-1f1b") else 0.0


@lru_cache(maxsize=256)
def fill_share(schedule: str, stages: int, batches: int) -> float:
    """The bubble of a schedule, as a share of that of GPipe and 1F1B on as many meshes.

    It is that of equal stages, whose parts of a backward take as long as a forward. 1 on one mesh,
    and for a user's own schedule.

    Raises:
        ScheduleError: the schedule does not admit these numbers.
    """
    if schedule in T_SCHEDULES or own(schedule) is not None:
        return 1.0
    lists = lists_of(schedule, stages, batches)
    if lists.num_meshes == 1:
        return 1.0
    name, _ = _parts(schedule)
    if batches >= 2 * lists.num_meshes and name in (*_FILL, "interleaved-1f1b"):
        return _FILL.get(name, 1 / chunks_of(schedule))
    found = measure(lists, Costs.uniform(stages))
    return found.bubble * batches / ((lists.num_meshes - 1) * max(found.busy))


def chunks_of(schedule: str) -> int:
    """The stages on each mesh."""
    mine = own(schedule)
    if mine is not None:
        return mine.num_stages // mine.num_meshes
    name, chunks = _parts(schedule)
    return chunks or stages_per_mesh(name)


def lists_of(schedule: str, stages: int, batches: int, *, has_backward: bool = True) -> WorkLists:
    """The lists of a plan's schedule.

    Args:
        schedule: of a plan.
        stages: on all meshes together.
        batches: micro-batches.
        has_backward: whether the program trains; others run the forwards alone.

    Raises:
        ScheduleError: the schedule does not admit these numbers.
    """
    mine = own(schedule)
    if mine is not None:
        return _own_lists(mine, stages, batches, has_backward)
    if not has_backward and chunks_of(schedule) == 1:
        return forward_only(stages, batches)
    lists = _named_lists(schedule, stages, batches)
    return lists if has_backward else forwards_of(lists)


def _own_lists(mine: WorkLists, stages: int, batches: int, has_backward: bool) -> WorkLists:
    check_numbers(mine, stages, batches)
    if mine.has_backward != has_backward:
        raise ScheduleError(
            "the schedule lists backwards, and the program has none"
            if mine.has_backward
            else "the program has a backward part, and the schedule lists none"
        )
    return mine


@lru_cache(maxsize=64)
def _named_lists(schedule: str, stages: int, batches: int) -> WorkLists:
    name, chunks = _parts(schedule)
    each = chunks_of(schedule)
    if stages % each:
        raise ScheduleError(
            f"{schedule} has {each} stages on each mesh, and {stages} is no multiple of {each}; "
            f"take {stages + -stages % each} stages, or a schedule of one stage per mesh, such as "
            "1f1b"
        )
    return schedule_of(name, stages // each, batches, chunks)


def forwards_of(schedule: WorkLists) -> WorkLists:
    """The forwards of a schedule in their order."""
    lists = (tuple(it for it in works if it.kind == "forward") for works in schedule.lists)
    return WorkLists(lists=tuple(lists))


def check_numbers(mine: WorkLists, stages: int | None, batches: int) -> None:
    """Raises ScheduleError unless a user's own schedule is for these numbers; None is any."""
    for what, its, wanted in (
        ("stages", mine.num_stages, stages),
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

    Of several stages on a mesh it is an even share, rounded up, of what the mesh keeps.

    Args:
        schedule: of a plan.
        batches: micro-batches.
        stages_to_last: stages from this one to the last.
        stages: all stages. None: whatever their number, at most.
    """
    mine, each = own(schedule), chunks_of(schedule)
    if schedule in _BY_STAGES_BEHIND:
        return _kept(stage_list(schedule, batches, stages_to_last))
    if mine is not None and stages is None:
        return max(-(-_kept(works) // each) for works in mine.lists)
    if stages is None:
        return batches
    lists = mine or _named_lists(schedule, stages, batches)
    return -(-_kept(lists.lists[lists.mesh_of[stages - stages_to_last]]) // each)


def needs_number(schedule: str) -> bool:
    """Whether what a stage keeps in flight depends on the number of all stages, too."""
    return schedule not in _BY_STAGES_BEHIND and own(schedule) is None


def splits_backward(schedule: str) -> bool:
    """Whether a plan's schedule lists the two parts of a backward."""
    mine = own(schedule)
    if mine is None:
        return _parts(schedule)[0] not in (*_BY_STAGES_BEHIND, "interleaved-1f1b")
    return mine.splits_backward


def _kept(works: Sequence[Work]) -> int:
    ones = (1.0,) * (1 + max(work.stage for work in works))
    return int(peak(works, ones, ones))


def _has_name(schedule: str) -> bool:
    return schedule in NAMES or _CHUNKS.fullmatch(schedule) is not None


def _parts(schedule: str) -> tuple[Name, int | None]:
    """The name of a schedule that has one, and the stages per mesh that it says."""
    match = _CHUNKS.fullmatch(schedule)
    if match is not None:
        return "interleaved-1f1b", int(match[1])
    return next(name for name in NAMES if name == schedule), None


def _or(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _one_line(schedule: WorkLists) -> str:
    return ";".join(to_table(schedule).split())


def _verify_planned(schedule: WorkLists) -> None:
    """As `verify`, and also refuses what plans cannot run."""
    verify(schedule)
    meshes = schedule.num_meshes
    for mesh, works in enumerate(schedule.lists):
        for number, work in enumerate(works):
            if work.stage < meshes and work.stage != mesh:
                raise ScheduleError(
                    f"{work} is on mesh {mesh}: in a plan, stage {work.stage} is on mesh "
                    f"{work.stage}, as each of the first {meshes} stages is on the mesh of its "
                    "number",
                    (mesh, number),
                )
    counts = [len({work.stage for work in works}) for works in schedule.lists]
    most, least = counts.index(max(counts)), counts.index(min(counts))
    if most != least:
        raise ScheduleError(
            f"mesh {most} has {counts[most]} stages and mesh {least} has {counts[least]}: in a "
            "plan, all meshes have equally many"
        )
