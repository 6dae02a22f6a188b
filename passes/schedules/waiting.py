"""How many micro-batches' versions of a value exist at once, by the lists of a schedule.

The lists are simulated with work that takes equally long. A version begins with the work that makes
it, or that reads it first where it has come from another mesh. It ends with the last work that
reads it there. If it is sent to another mesh, it ends with the first work that reads it there: it
moves before that work begins, and may still be on its way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from alpa.passes.schedules.planned import lists_of
from alpa.passes.schedules.simulate import Span, simulate
from alpa.passes.schedules.work import Work, WorkLists

Role = tuple[int, Literal["forward", "backward"]]
"""A stage, and the part of it that makes or reads a value for each micro-batch."""


@lru_cache(maxsize=4096)
def versions(
    schedule: str,
    stages: int,
    batches: int,
    maker: Role | None,
    readers: frozenset[Role],
    sent: frozenset[frozenset[Role]] = frozenset(),
    *,
    has_backward: bool = True,
) -> int:
    """The most versions that exist at once on a mesh.

    Args:
        schedule: of a plan.
        stages: on all meshes together.
        batches: micro-batches.
        maker: what makes the value on the mesh; None if it is received. Of a backward, its first
            part makes what others read.
        readers: what reads it on the mesh.
        sent: what reads it on each of the meshes that it is sent to.
        has_backward: whether the program trains.
    """
    lists, spans = _simulated(schedule, stages, batches, has_backward)
    changes: list[tuple[float, int]] = []
    for m in range(batches):
        making = [] if maker is None else _works(lists, maker, m)[:1]
        using = [spans[work] for work in making]
        using += [spans[work] for role in readers for work in _works(lists, role, m)]
        first = [min(spans[_works(lists, it, m)[0]].end for it in there) for there in sent]
        end = max([*first, *(span.end for span in using)])
        changes += [(min(span.start for span in using), 1), (end, -1)]
    now = most = 0
    for _, change in sorted(changes):  # What ends at a time does so before others begin.
        now += change
        most = max(most, now)
    return most


@lru_cache(maxsize=8)
def _simulated(
    schedule: str, stages: int, batches: int, has_backward: bool
) -> tuple[WorkLists, dict[Work, Span]]:
    lists = lists_of(schedule, stages, batches, has_backward=has_backward)
    return lists, simulate(dict(enumerate(lists.lists)), lists.needs, lambda _: 1.0)


def _works(lists: WorkLists, role: Role, m: int) -> list[Work]:
    """The work of a stage's part for a micro-batch: a backward may be two."""
    stage, part = role
    first = Work(stage, "forward", m) if part == "forward" else lists.backward_of(stage, m)
    assert first is not None, "a program with a backward part has lists with backwards"
    is_split = first.kind == "backward-input"
    return [first, Work(stage, "backward-weight", m)] if is_split else [first]
