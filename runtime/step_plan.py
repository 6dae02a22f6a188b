"""The plan of a step, as `train_step.plan(...)` returns it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from alpa.dialects import ir
from alpa.passes.plan.html import plan_html
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import plan_table
from alpa.runtime.questions.explanation import Explanation
from alpa.runtime.report import check_can_draw, write_report
from alpa.runtime.step import Step


class PlannedStep(Protocol):
    """The step that runs a plan."""

    step: Step

    def explain(self, what: str) -> tuple[Explanation, ...]:
        """As `StepPlan.explain`, without printing."""
        ...

    def close(self) -> None:
        """As `StepPlan.close`."""
        ...


@dataclass(frozen=True, kw_only=True, repr=False)
class StepPlan(PlanReport):
    """The plan of a step; the attributes of its report have the names of `PLAN.json`.

    `str` is the table that `alpa-plan` prints. As a context manager, it closes itself at the end.
    """

    module: ir.Module
    """the planned module"""
    roles: str = ""
    """the role of each argument, and the reason"""
    step: Callable[[], PlannedStep | None] = field(compare=False)
    """the step that runs the plan, while it is kept"""

    def save(self, path: str | Path) -> None:
        """Writes the planned module for `parallelize(..., plan=path)`."""
        Path(path).write_text(f"{self.module.operation.get_asm()}\n", encoding="utf-8")

    def explain(self, what: str) -> tuple[Explanation, ...]:
        """Prints and returns why the plan is so, and what every other choice would cost.

        The function is planned once more, with what questions need. Each other choice is then
        forced, and the rest solved again.

        Args:
            what: an argument ("state.params['wte']"), a line of a file whose ops are meant
                ("model.py:42"), or a stage ("stage 1").

        Returns:
            One explanation for each mesh that has the argument, else one.

        Raises:
            ValueError: the plan has no such argument, line or stage, or was read from a file.
        """
        step = self.step()
        if step is None:
            raise ValueError("the function of this plan is gone; plan it again to ask about it")
        found = step.explain(what)
        sys.stdout.write("\n".join(map(str, found)))
        return found

    def report(self, path: str | Path, *, trace: str | Path | None = None) -> None:
        """Writes a report of the plan: one HTML page that needs no network.

        Args:
            path: where to write it.
            trace: a file that `Executable.trace` wrote; the page compares a step of it.

        Raises:
            ReportError: Bokeh is missing, which `pip install 'alpa-mlir[report]'` installs, or the
                file is not a trace of this plan.
            OSError: a file cannot be read or written.
        """
        from alpa.runtime.report.content import Content  # noqa: PLC0415 - few plans need it

        check_can_draw()
        step = self.step()
        name = "a step" if step is None else step.step.name
        write_report(path, Content.of(self.module, self, name, trace=trace))

    def close(self) -> None:
        """Ends the workers that run the plan, if there are any; see `Parallelized.close`."""
        step = self.step()
        if step is not None:
            step.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        table = plan_table(self.module, self)
        return f"{table}\n{self.roles}\n" if self.roles else table

    def __repr__(self) -> str:
        first, *_ = str(self).splitlines()
        return f"<{first}>"

    def _repr_html_(self) -> str:
        """The stages and what limits them, as notebooks show it."""
        return plan_html(self)
