"""Pipeline schedules: in which order the stages work on micro-batches, and how long that takes.

A stage runs the forward of each of B micro-batches, the backward of each, and one update. Its order
follows from one number, the micro-batches that it may keep **in flight** (forward begun, backward
not ended): it runs the next forward while it may keep one more, else the next backward.

- ``gpipe`` keeps B: all forwards, then all backwards.
- ``1f1b`` keeps min(B, S - s) on stage s (from 0) of S: as many forwards, then one backward and one
  forward in turn, then the backwards that are left.

Without backwards (a forward-only program) both are the plain pipeline.

``rounds`` runs the stages against one another. A forward waits for the previous stage's forward of
its micro-batch, a backward for the next stage's backward. ``plan/instructions.py`` writes the
instructions of a step in this order, and ``plan/step_time.py`` simulates them.

**How T relates to these seconds.** Let p_i be the seconds of stage i's forward with the transfer
into it, q_i those of its backward with the transfer into it, a_i = p_i + q_i, u_i those of its
update, which waits only for the last backward of its own stage, and

    T  = sum_i a_i + (B - 1) max_i a_i + max_i u_i                   (minimised by ``stage_dp``)
    T+ = sum_i a_i + (B - 1) (max_i p_i + max_i q_i) + max_i u_i

so T <= T+, and T = T+ if one stage has both the longest forward and the longest backward. The
*pipeline part* of T or T+ is the expression without max u.

- Neither schedule takes longer than T+; where T = T+, neither takes longer than T.
- The pipeline part of gpipe equals that of T+: its forwards and its backwards are two flow shops of
  B equal jobs. T is therefore not an upper bound for gpipe. T assumes that forwards fill the gaps
  between backwards.
- The pipeline part of 1f1b lies between sum_i a_i + (B - 1) a_last and that of T+: every cycle of
  waiting stages has as many forwards as backwards on each, so its steady state takes max_i a_i per
  micro-batch; only the warm-up and the drain pair the forward of one stage with the backward of
  another. It is less than T where the slowest stage hides the work of those behind it.
- Both schedules take T if all stages are equal, or if the last stage has the longest forward and
  the longest backward. A forward-only pipeline takes T.
- The updates of all stages but the first begin while others still run backwards. max u is
  therefore an upper bound, and exact where the first stage's update is the longest.

If a value skips stages, only the stage that reads it receives it. ``stage_dp`` counts its transfer
at each stage in between, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["gpipe", "1f1b"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StageTask:
    """The forward or the backward of one micro-batch on a stage."""

    kind: Direction
    micro_batch: int

    def sender(self, stage: int) -> int:
        """The stage whose work a stage waits for; out of range at the ends of the pipeline."""
        return stage - 1 if self.kind == "forward" else stage + 1


def in_flight(schedule: Schedule, num_micro_batches: int, stages_to_last: int) -> int:
    """Micro-batches that a stage may keep, by the number of stages from it to the last one."""
    return num_micro_batches if schedule == "gpipe" else min(num_micro_batches, stages_to_last)


def order(
    schedule: Schedule, num_micro_batches: int, stages_to_last: int, *, backward: bool = True
) -> tuple[StageTask, ...]:
    """A stage's work on the micro-batches, in its order; only forwards unless ``backward``."""
    if not backward:
        return tuple(StageTask("forward", m) for m in range(num_micro_batches))
    kept = in_flight(schedule, num_micro_batches, stages_to_last)
    works = [StageTask("forward", m) for m in range(kept)]
    for m in range(num_micro_batches):
        works.append(StageTask("backward", m))
        if m + kept < num_micro_batches:
            works.append(StageTask("forward", m + kept))
    return tuple(works)


def rounds(
    schedule: Schedule,
    num_micro_batches: int,
    num_stages: int,
    *,
    backward: bool = True,
    is_ready: Callable[[int, StageTask], bool] = lambda stage, task: True,
) -> Iterator[list[tuple[int, StageTask]]]:
    """The work of all stages: in each round, every stage that is ready does its next work.

    A stage is ready if its neighbour has done that work in an earlier round, and if ``is_ready`` is
    true of the stage's number and its work. It waits for its neighbour even if it reads nothing
    from it: otherwise it could exceed the schedule's micro-batches in flight.

    Raises:
        ValueError: no stage is ready.
    """
    stages = range(num_stages)
    todo = [
        list(order(schedule, num_micro_batches, num_stages - s, backward=backward))[::-1]
        for s in stages
    ]
    done = {(kind, s): 0 for kind in ("forward", "backward") for s in stages}
    while any(todo):
        ready = [
            (s, task)
            for s, task in ((s, tasks[-1]) for s, tasks in enumerate(todo) if tasks)
            if done.get((task.kind, task.sender(s)), num_micro_batches) > task.micro_batch
            and is_ready(s, task)
        ]
        if not ready:
            raise ValueError(f"no stage can continue under {schedule}: each waits for another")
        yield ready
        for s, task in ready:
            todo[s].pop()
            done[task.kind, s] += 1
