"""What the rows of a plan's tables are called: each is a mesh, with one stage or several."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.text import count_text, ranges_text


def num_stages(report: PlanReport) -> int:
    """On all meshes together; a mesh without layers counts as one."""
    return sum(max(len(stage.numbers), 1) for stage in report.stages)


def pipeline_text(report: PlanReport) -> str:
    """`2 stages`, `4 stages on 2 meshes`."""
    stages, meshes = num_stages(report), len(report.stages)
    shared = f" on {count_text(meshes, 'mesh', 'meshes')}" if stages > meshes else ""
    return f"{count_text(stages, 'stage')}{shared}"


def noun_of(report: PlanReport) -> str:
    """What the rows of the table are."""
    return "mesh" if num_stages(report) > len(report.stages) else "stage"


def row_name(report: PlanReport, numbers: Sequence[int]) -> str:
    noun = noun_of(report)
    plural = "meshes" if noun == "mesh" else "stages"
    return f"{noun if len(numbers) == 1 else plural} {ranges_text(numbers)}"
