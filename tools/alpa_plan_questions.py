"""What `alpa-plan` says beside the plan: answers, comparisons, the price of what is forced."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.runtime.choices import read_hints
from alpa.runtime.planning import Planned
from alpa.runtime.questions.compare import PlanComparison, compare, read_numbers
from alpa.runtime.questions.explain import explain
from alpa.runtime.questions.hints import hints


def are_asked(options: argparse.Namespace) -> bool:
    """Whether questions about the plan follow, which need what its search finds."""
    return bool(options.explain) or options.save_hints is not None


def answers(options: argparse.Namespace, planned: Planned, clock: Clock) -> Iterator[str]:
    """Those to `--explain`. Raises QuestionError."""
    for what in options.explain:
        with clock.phase("explain"):
            texts = [str(answer) for answer in explain(what, planned, Clock(clock.on_phase))]
        yield from texts


def compared(first: Path, second: Path) -> PlanComparison:
    """How two plans differ. Raises ComparisonError."""
    return compare(read_numbers(first), read_numbers(second), (str(first), str(second)))


def price(free: Planned, forced: PlanReport) -> PlanComparison:
    """What the forced choices cost: the plan without them against the plan with them."""
    before, after = (json.loads(it.to_json()) for it in (PlanReport.of(free.module), forced))
    return compare(before, after, ("free", "forced"))


def given_hints(options: argparse.Namespace) -> tuple[str, ...]:
    """The choices of `--hints`. Raises ChoiceError."""
    return () if options.hints is None else read_hints(options.hints)


def hints_of(planned: Planned) -> str:
    """The text that `--save-hints` writes."""
    assert planned.kept is not None, "the search has kept what questions need"
    assert planned.kept.program is not None, "the search has ended"
    return hints(planned.module, planned.kept.program).rstrip("\n")
