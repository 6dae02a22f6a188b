"""What the report of a plan shows, read from the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa.dialects import ir
from alpa.passes.pipelines.diagnostics import Diagnostic
from alpa.passes.plan.communication import Communications
from alpa.passes.plan.layer_shardings import StageShardings, layer_shardings
from alpa.passes.plan.memory_over_time import MeshMemory, memory_over_time
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.timeline import Timeline
from alpa.runtime.exported import exported
from alpa.runtime.micro_batches import Attempt
from alpa.runtime.questions.compare import PlanComparison
from alpa.runtime.report import ReportError
from alpa.runtime.report.measured_step import MeasuredStep


@dataclass(frozen=True, kw_only=True)
class Content:
    """A plan in numbers, and its details.

    `remarks` are those of the passes; `attempts` are the numbers of micro-batches that were tried.
    """

    name: str
    """of the program"""
    numbers: PlanReport
    timeline: Timeline
    communications: Communications
    shardings: tuple[StageShardings, ...]
    compiled: Timeline
    """of the modules that are compiled, which may hold several parts"""
    memory: tuple[MeshMemory, ...]
    measured: MeasuredStep | None = None
    remarks: tuple[Diagnostic, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    forced: PlanComparison | None = None
    """the plan against the one without the choices that were forced"""

    @classmethod
    def of(
        cls,
        module: ir.Module,
        numbers: PlanReport,
        name: str,
        *,
        remarks: Sequence[Diagnostic] = (),
        attempts: Sequence[Attempt] = (),
        trace: str | Path | None = None,
        forced: PlanComparison | None = None,
    ) -> Content:
        """Reads a finished plan. Its stages are exported on a copy, for their memory.

        Args:
            module: the plan.
            numbers: the plan in numbers.
            name: of the program.
            remarks: of the passes.
            attempts: the numbers of micro-batches that were tried.
            trace: the file of a trace of this plan's steps, if one was measured.
            forced: the plan against the one without the choices that were forced, if any were.

        Raises:
            CheckError, PassError: the module is not planned, or its plan cannot be exported.
            ReportError: the file is not a trace of this plan.
            OSError: the trace cannot be read.
        """
        measured = None if trace is None else MeasuredStep.read(trace)
        if measured is not None:
            _check_meshes(measured, numbers, trace)
        program = read_planned(module)
        communications = Communications.of(module, program)
        stages = exported(module)
        return cls(
            name=name,
            numbers=numbers,
            timeline=Timeline.of(program, communications.fragment_seconds),
            communications=communications,
            shardings=tuple(layer_shardings(module, program)),
            compiled=Timeline.of(stages.program, [0.0] * len(stages.program.fragments)),
            measured=measured,
            memory=tuple(memory_over_time(stages.program, predicted_memory(stages.module))),
            remarks=tuple(remarks),
            attempts=tuple(attempts),
            forced=forced,
        )


def _check_meshes(measured: MeasuredStep, numbers: PlanReport, trace: str | Path | None) -> None:
    traced = {measured.mesh_of(worker) for worker in measured.workers}
    planned = {mesh.name for mesh in numbers.meshes}
    if traced != planned:
        raise ReportError(
            f"{trace} is a trace of another plan: it has {', '.join(sorted(traced))}, and this "
            f"plan has {', '.join(sorted(planned))}"
        )
