"""Pipeline schedules: in which order the stages work on micro-batches, and how long that takes.

A stage runs the forward of each of B micro-batches, the backward of each, and one update. Its order
follows from one number, the micro-batches that it may keep **in flight** (forward begun, backward
not ended): it runs the next forward while it may keep one more, else the next backward.

- ``gpipe`` keeps B: all forwards, then all backwards.
- ``1f1b`` keeps min(B, S - s) on stage s (from 0) of S: as many forwards, then one backward and one
  forward in turn, then the backwards that are left.

Without backwards (a forward-only program) both are the plain pipeline.

``simulate`` runs the stages against one another. A forward waits for the previous stage's forward
of its micro-batch, a backward for the next stage's backward. The update waits only for the last
backward of its own stage. Transfers do not overlap with compute: a transfer begins when its value
is made and the **receiving** stage is free, and occupies that stage until it ends. It costs the
sender nothing.

**How T relates to it.** Let p_i be the seconds of stage i's forward with the transfer into it, q_i
those of its backward with the transfer into it, a_i = p_i + q_i, and

    T  = sum_i a_i + (B - 1) max_i a_i + max_i u_i                   (``Pipeline.objective``)
    T+ = sum_i a_i + (B - 1) (max_i p_i + max_i q_i) + max_i u_i     (``Pipeline.bound``)

so T <= T+, and T = T+ if one stage has both the longest forward and the longest backward. The
*pipeline part* of T or T+ is the expression without max u.

- Neither schedule takes longer than T+; where T = T+, neither takes longer than T.
- The pipeline part of gpipe equals that of T+: its forwards and its backwards are two flow shops of
  B equal jobs. T is therefore not an upper bound for gpipe. T assumes that forwards fill the gaps
  between backwards.
- The pipeline's part of 1f1b lies between sum_i a_i + (B - 1) a_last and that of T+: every cycle of
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

from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

Schedule = Literal["gpipe", "1f1b"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StageTask:
    """The forward or the backward of one micro-batch on a stage."""

    kind: Direction
    micro_batch: int


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
    works: list[StageTask] = []
    begun = ended = 0
    while ended < num_micro_batches:
        if begun < num_micro_batches and begun - ended < kept:
            works.append(StageTask("forward", begun))
            begun += 1
        else:
            works.append(StageTask("backward", ended))
            ended += 1
    return tuple(works)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Seconds of every stage, first to last. A transfer belongs to the boundary i | i + 1."""

    forward: tuple[float, ...]
    """of one micro-batch"""
    backward: tuple[float, ...] | None = None
    """of one micro-batch; None = a forward-only program"""
    update: tuple[float, ...]
    """once per step"""
    forward_transfer: tuple[float, ...]
    """of one micro-batch into stage i + 1, [S - 1]"""
    backward_transfer: tuple[float, ...]
    """of one micro-batch into stage i, [S - 1]"""
    num_micro_batches: int
    schedule: Schedule

    def check(self) -> None:
        """Raises ``ValueError`` for what is no pipeline."""
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be gpipe or 1f1b, not {self.schedule!r}")
        if self.num_micro_batches < 1:
            raise ValueError(f"{self.num_micro_batches} micro-batches: at least 1 is needed")
        count = len(self.forward)
        if not count:
            raise ValueError("a pipeline has at least one stage")
        for name, values, length in (
            ("forward", self.forward, count),
            ("backward", self.backward or (0.0,) * count, count),
            ("update", self.update, count),
            ("forward_transfer", self.forward_transfer, count - 1),
            ("backward_transfer", self.backward_transfer, count - 1),
        ):
            if len(values) != length:
                raise ValueError(f"{name} needs {length} entries for {count} stages")
            if not all(isfinite(value) and value >= 0 for value in values):
                raise ValueError(f"{name} must be finite and not negative")

    @property
    def forward_with_transfer(self) -> tuple[float, ...]:
        """p: seconds of a forward and the transfer into it."""
        incoming = (0.0, *self.forward_transfer)
        return tuple(own + c for own, c in zip(self.forward, incoming, strict=True))

    @property
    def backward_with_transfer(self) -> tuple[float, ...]:
        """q: seconds of a backward and the transfer into it; zeros without backwards."""
        if self.backward is None:
            return (0.0,) * len(self.forward)
        incoming = (*self.backward_transfer, 0.0)
        return tuple(own + c for own, c in zip(self.backward, incoming, strict=True))

    def objective(self) -> float:
        """T, in seconds: the planner's objective."""
        p, q = self.forward_with_transfer, self.backward_with_transfer
        a = [forward + backward for forward, backward in zip(p, q, strict=True)]
        return sum(a) + (self.num_micro_batches - 1) * max(a) + max(self.update)

    def bound(self) -> float:
        """T+, in seconds: no schedule here takes longer."""
        p, q = self.forward_with_transfer, self.backward_with_transfer
        return sum(p) + sum(q) + (self.num_micro_batches - 1) * (max(p) + max(q)) + max(self.update)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of work in time; ``work`` is None for the update. Seconds from the step's begin."""

    work: StageTask | None
    receive: float
    """when the transfer into it begins to occupy the stage"""
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step in time."""

    seconds: float
    stages: tuple[tuple[Piece, ...], ...]
    """each stage's pieces in its order, the update last"""
    idle: tuple[float, ...]
    """share of the step in which a stage neither computes nor receives, 0 to 1"""
    in_flight: tuple[int, ...]
    """most micro-batches that a stage keeps; one, while it runs, without backwards"""


def simulate(pipeline: Pipeline) -> Simulation:
    """Runs one step. O(S B). Raises ``ValueError`` for what is no pipeline."""
    pipeline.check()
    timing = _Timing(pipeline)
    # Progress on one stage can unblock its neighbours. The wait graph is acyclic: every chain of
    # waits that ends at micro-batch m starts with forwards of micro-batches up to m + S.
    woken = list(range(len(pipeline.forward)))
    while woken:
        stage = woken.pop()
        if timing.advance(stage):
            woken += [s for s in (stage - 1, stage + 1) if 0 <= s < len(pipeline.forward)]
    stages = tuple(
        (*pieces, Piece(work=None, receive=end, start=end, end=end + update))
        for pieces, update in zip(timing.pieces, pipeline.update, strict=True)
        for end in (pieces[-1].end,)
    )
    seconds = max(pieces[-1].end for pieces in stages)
    busy = [sum(piece.end - piece.receive for piece in pieces) for pieces in stages]
    return Simulation(
        seconds=seconds,
        stages=stages,
        idle=tuple(1 - b / seconds if seconds else 0.0 for b in busy),
        in_flight=tuple(_peak_in_flight(works) for works in timing.orders),
    )


def _peak_in_flight(works: tuple[StageTask, ...]) -> int:
    kept = peak = 0
    for work in works:
        kept += 1 if work.kind == "forward" else -1
        peak = max(peak, kept)
    return peak if works[-1].kind == "backward" else 1


class _Timing:
    """How far each stage is."""

    def __init__(self, pipeline: Pipeline) -> None:
        count, batches = len(pipeline.forward), pipeline.num_micro_batches
        backward = pipeline.backward is not None
        self.orders = [
            order(pipeline.schedule, batches, count - s, backward=backward) for s in range(count)
        ]
        self.pieces: list[list[Piece]] = [[] for _ in range(count)]
        # Work of a kind runs in the order of the micro-batches: its end is at their number.
        self._ends: dict[Direction, list[list[float]]] = {
            "forward": [[] for _ in range(count)],
            "backward": [[] for _ in range(count)],
        }
        self._seconds: dict[Direction, tuple[float, ...]] = {
            "forward": pipeline.forward,
            "backward": pipeline.backward or (0.0,) * count,
        }
        self._receive: dict[Direction, tuple[float, ...]] = {
            "forward": (0.0, *pipeline.forward_transfer),
            "backward": (*pipeline.backward_transfer, 0.0),
        }

    def advance(self, stage: int) -> bool:
        """Runs a stage until it has to wait. Returns whether any work ran."""
        pieces, works = self.pieces[stage], self.orders[stage]
        before = len(pieces)
        while len(pieces) < len(works):
            work = works[len(pieces)]
            made = self._made(stage, work)
            if made is None:
                break
            receive = max(made, pieces[-1].end if pieces else 0.0)
            start = receive + self._receive[work.kind][stage]
            end = start + self._seconds[work.kind][stage]
            pieces.append(Piece(work=work, receive=receive, start=start, end=end))
            self._ends[work.kind][stage].append(end)
        return len(pieces) > before

    def _made(self, stage: int, work: StageTask) -> float | None:
        """When the neighbour's value is there; None if that is not known yet."""
        neighbour = stage - 1 if work.kind == "forward" else stage + 1
        if not 0 <= neighbour < len(self.orders):
            return 0.0  # what the last stage's backward needs, the stage has run before it
        ends = self._ends[work.kind][neighbour]
        return ends[work.micro_batch] if work.micro_batch < len(ends) else None
