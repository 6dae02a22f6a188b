"""The predicted step in time: what each mesh does when, and when it waits.

The times are those of `step_time.simulate`, which predicts the seconds of the step. A transfer is
there while it occupies the mesh that receives it. Where a mesh has nothing to do before the end of
the step, there is a bubble. The call of the step itself, if the cluster has seconds for it, comes
last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import Move, Run, reads, write_script
from alpa.passes.plan.step_time import Event, simulate, with_call

Activity = Literal["forward", "backward", "update", "transfer", "bubble", "call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """An activity of a mesh; `start` and `end` are seconds from the start of the step."""

    mesh: str
    activity: Activity
    start: float
    end: float
    name: str = ""
    """of the fragment, without its mesh; of a transfer the mesh that sends"""
    micro_batch: int | None = None
    collective_seconds: float = 0.0
    """of a run: what its collectives take"""
    bytes: int = 0
    """of a transfer: of the whole tensor"""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The spans of a step, mesh by mesh in time; `seconds` is its end."""

    spans: tuple[StepSpan, ...]
    seconds: float

    @classmethod
    def of(cls, program: Program, collective_seconds: Sequence[float]) -> Timeline:
        """The timeline of a plan whose fragments and transfers have their seconds.

        Args:
            program: the plan.
            collective_seconds: of one run, for each fragment of the program.
        """
        events = simulate(write_script(program))
        end = max((event.end for event in events), default=0.0)
        cluster = cluster_here(program.plan.cluster)
        last = end if cluster is None else with_call(end, program, cluster)
        inside = dict(zip(map(id, program.fragments), collective_seconds, strict=True))
        spans: list[StepSpan] = []
        for mesh in program.meshes:
            mine = [it for it in events if it.mesh == mesh.name and it.end > it.start]
            free = 0.0
            for event in mine:
                if event.start > free:
                    spans.append(_bubble(mesh.name, free, event.start))
                spans.append(_span(program, event, inside))
                free = max(free, event.end)
            if end > free:
                spans.append(_bubble(mesh.name, free, end))
            if last > end:
                call = StepSpan(mesh=mesh.name, activity="call", start=end, end=last)
                spans.append(call)
        return cls(spans=tuple(spans), seconds=last)

    def on(self, mesh: str) -> Iterator[StepSpan]:
        """The spans of one mesh."""
        return (span for span in self.spans if span.mesh == mesh)


def _bubble(mesh: str, start: float, end: float) -> StepSpan:
    return StepSpan(mesh=mesh, activity="bubble", start=start, end=end)


def _span(program: Program, event: Event, inside: dict[int, float]) -> StepSpan:
    it = event.instruction
    micro_batch = next((m for _, m in reads(it) if m is not None), None)
    if isinstance(it, Run):
        return StepSpan(
            mesh=event.mesh,
            activity=it.fragment.part,
            start=event.start,
            end=event.end,
            name=it.fragment.name.removeprefix(f"{event.mesh}."),
            micro_batch=micro_batch,
            collective_seconds=inside[id(it.fragment)],
        )
    assert isinstance(it, Move), "sums take no time"
    source = program.values[it.source[0]]
    return StepSpan(
        mesh=event.mesh,
        activity="transfer",
        start=event.start,
        end=event.end,
        name=source.mesh,
        micro_batch=micro_batch,
        bytes=source.bytes,
    )
