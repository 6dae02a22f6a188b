"""The report of a plan that `alpa-plan --report` writes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.runtime.micro_batches import Attempt
from alpa.runtime.planning import Planned
from alpa.runtime.questions.compare import PlanComparison
from alpa.runtime.report import ReportError, check_can_draw
from alpa.tools.programs import placed


def check_report(options: argparse.Namespace) -> None:
    """Raises ReportError, before anything is planned, if no report can be written."""
    if options.report is None:
        if options.trace is not None:
            raise ReportError("--trace is for --report; add it, or remove --trace")
        return
    check_can_draw()
    if options.trace is not None and not options.trace.is_file():
        raise ReportError(f"there is no trace {options.trace}; write one by `step.trace(path)`")


def report_page(
    options: argparse.Namespace,
    planned: Planned,
    numbers: PlanReport,
    attempts: Sequence[Attempt],
    forced: PlanComparison | None,
    clock: Clock,
) -> str | None:
    """The page as text, if it is asked for.

    Raises:
        ReportError: the trace is not one of this plan.
    """
    if options.report is None:
        return None
    from alpa.runtime.report.content import Content  # noqa: PLC0415 - start-up time
    from alpa.runtime.report.page import page  # noqa: PLC0415 - it needs Bokeh

    with clock.phase("write the report"):
        content = Content.of(
            planned.module,
            numbers,
            options.program,
            remarks=[placed(remark, options.program) for remark in planned.remarks],
            attempts=attempts,
            trace=options.trace,
            forced=forced,
        )
        return page(content)
