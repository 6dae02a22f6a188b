"""What each step of the sharding solver saves: every case is solved with each step switched off.

Seconds, and the time limit, are processor time of this process, which other work on the machine
changes little. Runs with all steps are made between the others, so that both see the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Self
from unittest.mock import patch

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding import ilp, pareto
from alpa.passes.solve.sharding.bound import dual_bound
from alpa.passes.solve.sharding.prices import priced
from alpa.passes.solve.sharding.problem import InfeasibleError, Memory
from alpa.passes.solve.sharding.settings import ALL, Step
from alpa.tools.bench.cases import Case
from alpa.tools.output import markdown_header, markdown_row

STEPS = {step.value: step for step in Step}
_EVERY = 4
"""Runs without some step between two with all steps."""
COLUMNS = ("case", "class", "without", "objective", "bound", "gap", "seconds", "time", "objective")


class _Watched(tuple[Step, ...]):
    """Steps that note those that the search asks for."""

    asked: set[object]

    def __new__(cls) -> Self:
        made = super().__new__(cls, ALL)
        made.asked = set()
        return made

    def __contains__(self, step: object) -> bool:
        self.asked.add(step)
        return super().__contains__(step)


def without(names: Sequence[str]) -> tuple[Step, ...]:
    """All steps but those of these names."""
    return tuple(step for step in ALL if step.value not in names)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One solution of a case; the objective is inf where none was found in time."""

    objective: float
    bound: float
    seconds: float
    """of processor time"""

    @property
    def gap(self) -> float:
        """Between objective and bound, as a part of the objective."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / self.objective if self.objective < math.inf else 1.0


def run(case: Case, steps: Collection[Step], time_limit: float) -> Run:
    """Solves a case once. With prices the objective is the sum over all of them, at their prices;
    their bounds are not told."""
    begun = time.process_time()
    try:
        # The solver's deadlines are told by this clock.
        with patch.object(time, "monotonic", time.process_time):
            if case.prices:
                objective, bound = _priced(case, steps, time_limit)
            else:
                solution = ilp.solve(
                    case.problem, time_limit=time_limit, branch_gap=case.gap, steps=steps
                )
                objective, bound = solution.objective, solution.bound
    except (TimeoutError, InfeasibleError, SolverFailedError):
        objective, bound = math.inf, -math.inf
    return Run(objective=objective, bound=bound, seconds=time.process_time() - begun)


def _priced(case: Case, steps: Collection[Step], time_limit: float) -> tuple[float, float]:
    problem = case.problem
    choices = pareto.solve(
        problem, case.prices, gap=case.gap, time_limit=time_limit, enough=case.enough, steps=steps
    )
    memory = Memory(problem)
    times = memory.times[:1].tolist()
    unit = problem.cost(choices[0]) / problem.memory_limit
    prices = (0.0, *case.prices)
    total = sum(
        priced(problem, memory, dict.fromkeys(times, price * unit)).cost(choice)
        for price, choice in zip(prices, choices, strict=False)
    )
    return total, min(total, dual_bound(problem))


def ablate(
    case: Case, groups: Sequence[tuple[str, ...]], *, time_limit: float, runs: int
) -> dict[tuple[str, ...], Run]:
    """The median run with all steps, ``()``, and without each group of steps.

    Groups of which the search comes to no step are left out.
    """
    watched = _Watched()
    run(case, watched, time_limit)  # Its seconds include imports.
    reached = [group for group in groups if any(STEPS[name] in watched.asked for name in group)]
    made: dict[tuple[str, ...], list[Run]] = {group: [] for group in [(), *reached]}
    for _ in range(runs):
        for number, group in enumerate(reached):
            if number % _EVERY == 0:
                made[()].append(run(case, ALL, time_limit))
            made[group].append(run(case, without(group), time_limit))
    made[()] = made[()] or [run(case, ALL, time_limit)]
    return {group: _median(of) for group, of in made.items()}


def _median(runs: Sequence[Run]) -> Run:
    """The first run, with the median of all seconds: the others find the same."""
    return replace(runs[0], seconds=median(one.seconds for one in runs))


def rows(case: Case, runs: Mapping[tuple[str, ...], Run]) -> list[str]:
    """A line of Markdown for all steps, and one per group that was switched off."""
    return [_row(case, "+".join(group), one, runs[()]) for group, one in runs.items()]


def header() -> str:
    """The first lines of the table."""
    return markdown_header(COLUMNS)


def _row(case: Case, name: str, one: Run, base: Run) -> str:
    found = one.objective < math.inf
    changes = ["", ""]
    if name:
        changes[0] = f"{one.seconds / base.seconds - 1:+.0%}"
        changes[1] = f"{one.objective / base.objective - 1:+.2%}" if found else "none found"
    return markdown_row(
        [
            case.name if not name else "",
            case.kind if not name else "",
            name or "(nothing)",
            f"{one.objective:.6g}" if found else "none",
            f"{one.bound:.6g}" if found and not case.prices else "",
            f"{one.gap:.2%}" if found and not case.prices else "",
            f"{one.seconds:.2f}",
            *changes,
        ]
    )
