"""Reads and writes a schedule as a table, one row per mesh.

A table is comma-separated text, as torch writes its pipeline schedules: a row lists the work of a
mesh in order, such as `0F0,0F1,0B0,0B1`. Empty cells are idle times, and have no meaning here.
Empty lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from alpa.passes.schedules.verify import ScheduleError, verify
from alpa.passes.schedules.work import LETTERS, Kind, Work, WorkLists
from alpa.passes.text_files import read_text

_WORK = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}


def read_table(file: Path) -> WorkLists:
    """The schedule of a file, checked.

    Raises:
        ScheduleError: it is no UTF-8 text, a cell is no work, or the schedule cannot be run; the
            message begins with the file, the line and the column.
        OSError: the file cannot be read.
    """
    return parse_table(table_text(file), name=str(file))


def table_text(file: Path) -> str:
    """The text of a file. Raises ScheduleError with its place unless it is UTF-8, and OSError."""
    try:
        return read_text(file)
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise ScheduleError(
            f"{file}:{line}:{column}: byte 0x{error.object[error.start]:02x} is not UTF-8; a table "
            "is text such as 0F0,0F1,0B0,0B1"
        ) from None


def parse_table(
    text: str, *, name: str = "schedule", check: Callable[[WorkLists], None] = verify
) -> WorkLists:
    """As `read_table`, of text; `check` raises ScheduleError for what is refused."""
    lists: list[list[Work]] = []
    places: list[list[tuple[int, int]]] = []
    for line, row in enumerate(text.splitlines(), start=1):
        if not row.strip() or row.lstrip().startswith("#"):
            continue
        works: list[Work] = []
        where: list[tuple[int, int]] = []
        column = 1
        for cell in row.split(","):
            word = cell.strip()
            start = column + len(cell) - len(cell.lstrip())
            column += len(cell) + 1
            if not word:
                continue
            try:
                works.append(parse_work(word))
            except ValueError as error:
                raise ScheduleError(f"{name}:{line}:{start}: {error}") from None
            where.append((line, start))
        lists.append(works)
        places.append(where)
    found = WorkLists(lists=tuple(map(tuple, lists)))
    try:
        check(found)
    except ScheduleError as error:
        line, column = places[error.at[0]][error.at[1]] if error.at else (1, 1)
        raise ScheduleError(f"{name}:{line}:{column}: {error}", error.at) from None
    return found


def from_words(
    rows: Sequence[Sequence[str]], *, check: Callable[[WorkLists], None] = verify
) -> WorkLists:
    """The schedule of lists of words such as `0F1`, one list per mesh.

    Raises:
        ScheduleError: a word is no work, or the schedule cannot be run.
    """
    lists: list[tuple[Work, ...]] = []
    for mesh, row in enumerate(rows):
        try:
            lists.append(tuple(map(parse_work, row)))
        except ValueError as error:
            raise ScheduleError(f"mesh {mesh}: {error}") from None
    found = WorkLists(lists=tuple(lists))
    check(found)
    return found


def parse_work(word: str) -> Work:
    """Work of its word. Raises ValueError for another word."""
    parts = _WORK.fullmatch(word)
    if parts is None:
        raise ValueError(
            f'"{word}" is no work; expected <stage><F, B, I or W><micro-batch>, such as 0F3'
        )
    return Work(int(parts[1]), _KINDS[parts[2]], int(parts[3]))


def to_table(schedule: WorkLists) -> str:
    """The table of a schedule, without idle times."""
    return "".join(",".join(map(str, works)) + "\n" for works in schedule.lists)
