"""What a mesh holds of its micro-batches while it runs a list with backwards in two parts.

Of a stage's activations, some are read by the first part of its backward alone. The mesh frees them
behind that part, and the others behind the second one. It keeps what the first part makes for the
second. So the fullest moment depends on what is large: a mesh holds many micro-batches before their
first parts, or many between the parts, hardly both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from alpa.passes.schedules.planned import chunks_of, in_flight, lists_of
from alpa.passes.schedules.work import Work


class Bytes(NamedTuple):
    """What a stage holds for one micro-batch. Numbers, or arrays of them."""

    freed: float | np.ndarray
    """activations that the first part of a backward alone reads"""
    read: float | np.ndarray
    """those that the second part reads"""
    made: float | np.ndarray
    """what the first part makes for the second, and gradients from the stage behind that the second
    part reads, too"""

    def at(self, *place: int) -> Bytes:
        """Those of one stage, where they are arrays."""
        return Bytes(*(float(np.asarray(it)[place]) for it in self))

    def held(self, count: Count) -> float | np.ndarray:
        """For so many micro-batches."""
        return count.freed * self.freed + count.read * self.read + count.made * self.made


class Count(NamedTuple):
    """For how many micro-batches a stage holds each of its `Bytes` at a moment."""

    freed: float
    """from the forward to the end of the first part"""
    read: float
    """from the forward to the end of the second part"""
    made: float
    """from the begin of the first part to the end of the second; none in the first stage, of which
    the first part has nothing to do"""


CountsOfStages = tuple[tuple[int, tuple[Count, ...]], ...]
"""By numbers of micro-batches in flight, ascending."""


@lru_cache(maxsize=256)
def moments(schedule: str, stages: int, batches: int, mesh: int) -> tuple[dict[int, Count], ...]:
    """The moments of a mesh's list of which no other one has as much of everything.

    Args:
        schedule: of a plan; it splits backwards.
        stages: on all meshes together.
        batches: micro-batches.
        mesh: its number.
    """
    works = lists_of(schedule, stages, batches).lists[mesh]
    mine = list(dict.fromkeys(work.stage for work in works))
    rows = np.unique(np.array([*_rows(works, mine)]), axis=0)
    return tuple(
        {s: Count(*row[3 * n : 3 * n + 3].tolist()) for n, s in enumerate(mine)}
        for row in _largest(rows)
    )


def fullest(
    schedule: str, stages: int, batches: int, mesh: int, bytes_of: Mapping[int, Bytes]
) -> dict[int, Count]:
    """The moment at which a mesh holds the most, by what each of its stages holds; those that are
    not given hold nothing."""
    return max(
        moments(schedule, stages, batches, mesh), key=lambda moment: held_at(moment, bytes_of)
    )


def held_at(moment: Mapping[int, Count], bytes_of: Mapping[int, Bytes]) -> float:
    """What a mesh holds at a moment."""
    return sum(float(bytes_of[s].held(it)) for s, it in moment.items() if s in bytes_of)


@lru_cache(maxsize=64)
def counts_of_stages(schedule: str, batches: int, numbers: tuple[int, ...]) -> CountsOfStages:
    """What a stage may hold, by the micro-batches that it keeps in flight (`in_flight`), ascending.

    Of several stages on a mesh it is an even share of what the mesh holds; the first stage of all
    has no share of what is made.

    Args:
        schedule: of a plan; it splits backwards.
        batches: micro-batches.
        numbers: how many stages there may be.
    """
    each = chunks_of(schedule)
    found: dict[int, set[Count]] = {}
    for stages in numbers:
        for mesh in range(stages // each):
            kept = in_flight(schedule, batches, stages - mesh, stages)
            mine = found.setdefault(kept, set())
            for moment in moments(schedule, stages, batches, mesh):
                freed, read, made = (sum(them) for them in zip(*moment.values(), strict=True))
                makers = each - (mesh == 0)
                mine.add(Count(freed / each, read / each, made / max(1, makers)))
    return tuple((kept, tuple(_largest_of(found[kept]))) for kept in sorted(found))


def _rows(works: Iterable[Work], stages: list[int]) -> Iterator[list[float]]:
    """The counts of all stages while each item runs. A whole backward runs its parts in turn."""
    now: dict[int, tuple[int, int, int]] = dict.fromkeys(stages, (0, 0, 0))
    """before the first part, in it, and behind it"""

    def row(stage: int, before: int, during: int, behind: int) -> list[float]:
        now[stage] = before, during, behind
        return [number for it in now.items() for number in _count(*it)]

    for work in works:
        s = work.stage
        before, _, behind = now[s]
        if work.kind == "forward":
            yield row(s, before + 1, 0, behind)
        if work.hands_back:
            yield row(s, before - 1, 1, behind)
            before, behind = before - 1, behind + 1
            yield row(s, before, 0, behind)
        if work.frees:
            now[s] = before, 0, behind - 1


def _count(stage: int, now: tuple[int, int, int]) -> Count:
    before, during, behind = now
    every = before + during + behind
    return Count(before + during, every, during + behind) if stage else Count(every, every, 0)


def _largest_of(counts: Iterable[Count]) -> list[Count]:
    return [Count(*row.tolist()) for row in _largest(np.array(sorted(counts)))]


def _largest(rows: np.ndarray) -> np.ndarray:
    """The different rows of which no other one is as large in every column."""
    covered = (rows[:, None] <= rows[None]).all(axis=2).sum(axis=1) > 1
    return rows[~covered]
