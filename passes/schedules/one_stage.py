"""Schedules of one stage per mesh: GPipe, 1F1B, eager 1F1B, ZB-H1.

The first three differ in how many micro-batches a stage keeps **in flight** (forward begun,
backward not ended). `s` is the number of stages from it to the last one, itself included, `B` the
number of micro-batches:

- `gpipe` keeps B: all forwards, then all backwards (Huang et al., 2019).
- `1f1b` keeps min(B, s): as many forwards, then one backward and one forward in turn, then the
  backwards that are left (PipeDream-Flush; Narayanan et al., 2021).
- `eager-1f1b` keeps min(B, 2s - 1). A value has then one more item of work in which to travel in
  each direction (Zhuang et al., 2023, "On optimizing the communication of model parallelism").
- `zb-h1` splits backwards (Qi et al., 2023, "Zero bubble pipeline parallelism"). Forwards are ahead
  as in 1F1B, and stage d (from 0) leaves the weight gradients of d micro-batches for later. So each
  mesh holds what the first one holds under 1F1B, and the bubble is (S - 1) (F + I - W) seconds, not
  (S - 1) (F + I + W).

Without backwards all are the plain pipeline.
"""

from __future__ import annotations

from typing import Literal

from alpa.passes.schedules.work import Kind, Work, WorkLists

WholeBackward = Literal["gpipe", "1f1b", "eager-1f1b"]
"""Schedules whose lists follow from what a stage keeps in flight."""


def keeping(schedule: WholeBackward, batches: int, stages_to_last: int) -> int:
    """Micro-batches whose forwards a stage begins with, by the stages from it to the last one."""
    if schedule == "gpipe":
        return batches
    return min(batches, stages_to_last if schedule == "1f1b" else 2 * stages_to_last - 1)


def stage_list(
    schedule: WholeBackward, batches: int, stages_to_last: int, *, stage: int = 0
) -> tuple[Work, ...]:
    """A stage's list: as many forwards as it keeps, then a backward and a forward in turn."""
    kept = keeping(schedule, batches, stages_to_last)
    works = [Work(stage, "forward", m) for m in range(kept)]
    for m in range(batches):
        works.append(Work(stage, "backward", m))
        if m + kept < batches:
            works.append(Work(stage, "forward", m + kept))
    return tuple(works)


def whole_backward(schedule: WholeBackward, meshes: int, batches: int) -> WorkLists:
    """GPipe, 1F1B or eager 1F1B."""
    return WorkLists(
        lists=tuple(
            stage_list(schedule, batches, meshes - stage, stage=stage) for stage in range(meshes)
        )
    )


def forward_only(meshes: int, batches: int) -> WorkLists:
    """The plain pipeline."""
    return WorkLists(
        lists=tuple(
            tuple(Work(stage, "forward", m) for m in range(batches)) for stage in range(meshes)
        )
    )


def zb_h1(meshes: int, batches: int) -> WorkLists:
    """ZB-H1."""
    return WorkLists(lists=tuple(_zb_h1(meshes, batches, d) for d in range(meshes)))


def _zb_h1(meshes: int, batches: int, d: int) -> tuple[Work, ...]:
    """While forwards are left, a backward-input is followed by the weight gradients of d
    micro-batches before it, and by a forward; then by the weight gradients that are left."""
    first = min(batches, meshes - d)
    works = [Work(d, "forward", m) for m in range(first)]

    def add(kind: Kind, m: int) -> None:
        if 0 <= m < batches:
            works.append(Work(d, kind, m))

    for m in range(batches):
        add("backward-input", m)
        add("backward-weight", m - d)
        add("forward", m + first)
    for m in range(max(0, batches - d), batches):
        add("backward-weight", m)
    return tuple(works)
