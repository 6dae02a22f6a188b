"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

from alpa.passes.schedules.dualpipe_v import dualpipe_v
from alpa.passes.schedules.interleaved import interleaved_1f1b
from alpa.passes.schedules.one_stage import whole_backward, zb_h1
from alpa.passes.schedules.v_shape import v_half, v_min, zb_v
from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.schedules.work import WorkLists

# `dialects/plan.py` has the same names in the IR's terms. What schedules are knows no IR.
Name = Literal[
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "zb-v",
    "v-half",
    "v-min",
    "dualpipe-v",
]
NAMES: tuple[Name, ...] = get_args(Name)
_ONE: dict[Name, Callable[[int, int], WorkLists]] = {
    "gpipe": partial(whole_backward, "gpipe"),
    "1f1b": partial(whole_backward, "1f1b"),
    "eager-1f1b": partial(whole_backward, "eager-1f1b"),
    "zb-h1": zb_h1,
}
_TWO: dict[Name, Callable[[int, int], WorkLists]] = {
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
}
"""with two stages per mesh"""


def stages_per_mesh(name: Name) -> int:
    """How many stages a mesh has; of `interleaved-1f1b`, where nothing else is asked for."""
    return 2 if name in _TWO or name == "interleaved-1f1b" else 1


def schedule_of(name: Name, meshes: int, batches: int, chunks: int | None = None) -> WorkLists:
    """A schedule by its name.

    Args:
        name: one of `NAMES`.
        meshes: at least 1.
        batches: micro-batches, at least 1.
        chunks: stages per mesh. None: as many as the schedule has, 2 for `interleaved-1f1b`.

    Raises:
        ScheduleError: the schedule does not admit these numbers.
    """
    if meshes < 1 or batches < 1:
        raise ScheduleError(
            f"{name} needs at least one mesh and one micro-batch, not {meshes} and {batches}"
        )
    fixed = stages_per_mesh(name)
    if name == "interleaved-1f1b":
        return interleaved_1f1b(meshes, batches, fixed if chunks is None else chunks)
    if chunks not in (None, fixed):
        raise ScheduleError(
            f"{name} has {fixed} stages per mesh, not {chunks}; interleaved-1f1b takes any number"
        )
    return (_TWO if fixed == 2 else _ONE)[name](meshes, batches)
