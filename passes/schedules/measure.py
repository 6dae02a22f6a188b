"""The seconds and the memory of a schedule, by the simulator and by its lists.

Memory follows from the list of a mesh alone: a forward holds the activations of its stage, a whole
backward or a backward-weight frees them, and a backward-input frees what the backward-weight does
not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from alpa.passes.schedules.simulate import Span, simulate
from alpa.passes.schedules.work import Kind, Work, WorkLists


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of each stage: seconds per micro-batch, seconds of its update, and bytes.

    A whole backward takes `backward_input + backward_weight`. Transfers into a stage from another
    mesh take `forward_transfer` and `backward_transfer`; inside a mesh they take nothing. Of each
    transfer, the share `hidden` comes first and runs beside the mesh's work, one at a time; then
    the rest occupies the mesh. `held` are the activations of one micro-batch, `kept` what of them a
    backward-weight reads after its backward-input.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    forward_transfer: tuple[float, ...]
    backward_transfer: tuple[float, ...]
    update: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    hidden: tuple[float, ...]

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        transfer: float = 0.0,
        hidden: float = 0.0,
    ) -> Self:
        """Equal stages that hold 1 from the forward to the end of the backward."""

        def each(value: float) -> tuple[float, ...]:
            return (value,) * num_stages

        return cls(
            forward=each(forward),
            backward_input=each(backward_input),
            backward_weight=each(backward_weight),
            forward_transfer=each(transfer),
            backward_transfer=each(transfer),
            update=each(0.0),
            held=each(1.0),
            kept=each(1.0),
            hidden=each(hidden),
        )

    def seconds(self, work: Work) -> float:
        """Of an item of work."""
        s = work.stage
        if work.kind == "forward":
            return self.forward[s]
        parts: dict[Kind, float] = {
            "backward-input": self.backward_input[s],
            "backward-weight": self.backward_weight[s],
        }
        return parts.get(work.kind, sum(parts.values()))

    def transfer_seconds(self, work: Work) -> float:
        """Of the transfer of what an item of work reads."""
        into = self.forward_transfer if work.kind == "forward" else self.backward_transfer
        return into[work.stage]


class Event(NamedTuple):
    """What occupies a mesh: work, the receive of what it reads, a stage's update. Or its link: the
    hidden part of a receive."""

    what: Literal["work", "receive", "hidden", "update"]
    work: Work | int
    """of an update, its stage"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A simulated schedule: seconds of a step, and of each mesh the busy seconds and the peak."""

    seconds: float
    busy: tuple[float, ...]
    """in which a mesh works, or receives and cannot work"""
    peak: tuple[float, ...]
    """the most that a mesh holds, in the unit of `Costs.held`"""
    spans: dict[Event, Span]

    @property
    def bubble(self) -> float:
        """Seconds in which the busiest mesh has nothing to do."""
        return self.seconds - max(self.busy)


def measure(schedule: WorkLists, costs: Costs) -> Measured:
    """Simulates a schedule.

    Raises:
        DeadlockError: `verify` refuses it.
    """
    lists: dict[tuple[str, int], list[Event]] = {}
    for mesh, works in enumerate(schedule.lists):
        mine = lists["mesh", mesh] = []
        link = lists["link", mesh] = []
        for work in works:
            if schedule.received(work):
                mine.append(Event("receive", work))
                if costs.hidden[work.stage]:
                    link.append(Event("hidden", work))
            mine.append(Event("work", work))
        stages = dict.fromkeys(work.stage for work in works)
        mine.extend(Event("update", stage) for stage in stages)

    def needs(event: Event) -> list[Event]:
        if not isinstance(event.work, Work):
            return []
        other = schedule.received(event.work)
        if event.what == "receive" and costs.hidden[event.work.stage]:
            return [Event("hidden", event.work)]
        if event.what in ("receive", "hidden"):
            return [Event("work", it) for it in other]
        own = [Event("work", it) for it in schedule.needs(event.work) if it not in other]
        return [*own, Event("receive", event.work)] if other else own

    def seconds(event: Event) -> float:
        if not isinstance(event.work, Work):
            return costs.update[event.work]
        hidden = costs.hidden[event.work.stage]
        if event.what == "hidden":
            return hidden * costs.transfer_seconds(event.work)
        if event.what == "receive":
            return (1 - hidden) * costs.transfer_seconds(event.work)
        return costs.seconds(event.work)

    spans = simulate(lists, needs, seconds)
    return Measured(
        seconds=max((span.end for span in spans.values()), default=0.0),
        busy=tuple(sum(map(seconds, lists["mesh", mesh])) for mesh in range(schedule.num_meshes)),
        peak=tuple(peak(works, costs.held, costs.kept) for works in schedule.lists),
        spans=spans,
    )


def peak(works: Sequence[Work], held: Sequence[float], kept: Sequence[float]) -> float:
    """The most that a mesh holds while it runs its list.

    Args:
        works: the list.
        held: of each stage, from its forward on.
        kept: of each stage, from its backward-input to its backward-weight.
    """
    now = most = 0.0
    for work in works:
        s = work.stage
        if work.kind == "forward":
            now += held[s]
            most = max(most, now)
        elif work.kind == "backward-input":
            now -= held[s] - kept[s]
        else:
            now -= kept[s] if work.kind == "backward-weight" else held[s]
    return most
