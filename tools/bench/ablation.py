"""What each step and each tuned number of the sharding solver is worth.

Every case is solved with the default settings, and with variants of them: without a step, or with a
number halved or doubled. Seconds, and the time limit, are processor time of this process, which
other work on the machine changes little. Runs with the default settings are made between the
others, so that both see the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Self
from unittest.mock import patch

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding import ilp, pareto
from alpa.passes.solve.sharding.bound import dual_bound
from alpa.passes.solve.sharding.prices import priced
from alpa.passes.solve.sharding.problem import InfeasibleError, Memory
from alpa.passes.solve.sharding.settings import ALL, DEFAULT, Settings, Step, Tuning
from alpa.tools.bench.cases import Case
from alpa.tools.output import markdown_header, markdown_row

STEPS = {step.value: step for step in Step}
NUMBERS = {field.name: getattr(DEFAULT.tuning, field.name) for field in fields(Tuning)}
_EVERY = 4
"""Runs of variants between two with the default settings."""
COLUMNS = ("case", "class", "variant", "objective", "bound", "gap", "seconds", "time", "objective")


class _WatchedSteps(tuple[Step, ...]):
    """All steps; notes those that the search asks for."""

    asked: set[object]

    def __new__(cls) -> Self:
        made = super().__new__(cls, ALL)
        made.asked = set()
        return made

    def __contains__(self, step: object) -> bool:
        self.asked.add(step)
        return super().__contains__(step)


class _WatchedTuning(Tuning):
    """The default numbers; notes those that the search reads."""

    def __getattribute__(self, name: str) -> object:
        if name in NUMBERS:
            self.__dict__.setdefault("read", set()).add(name)
        return super().__getattribute__(name)

    def __reduce__(self) -> str | tuple[object, ...]:
        return Tuning, ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings that differ from the default in some steps or numbers."""

    name: str
    settings: Settings
    uses: frozenset[str]
    """Names of the steps and numbers. A search that comes to none of them is the default one."""


BASE = Variant(name="", settings=DEFAULT, uses=frozenset())


def without(names: Sequence[str]) -> Variant:
    """All steps but those of these names."""
    steps = tuple(step for step in ALL if step.value not in names)
    return Variant(name="+".join(names), settings=Settings(steps=steps), uses=frozenset(names))


def varied(name: str, factor: float) -> Variant:
    """A tuned number multiplied by a factor.

    Whole numbers stay whole, and at least 1. A share of more than one half keeps below 1: its
    distance from 1 is multiplied.
    """
    old = NUMBERS[name]
    if isinstance(old, int):
        new: float = max(1, round(old * factor))
    elif 0.5 < old < 1:
        new = 1 - (1 - old) * factor
    else:
        new = old * factor
    tuning = replace(DEFAULT.tuning, **{name: new})
    return Variant(name=f"{name}={new:g}", settings=Settings(tuning=tuning), uses=frozenset({name}))


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


def run(case: Case, settings: Settings, time_limit: float) -> Run:
    """Solves a case once. With prices the objective is the sum over all of them, at their prices;
    their bounds are not told."""
    begun = time.process_time()
    try:
        # The solver's deadlines are told by this clock.
        with patch.object(time, "monotonic", time.process_time):
            if case.prices:
                objective, bound = _priced(case, settings, time_limit)
            else:
                solution = ilp.solve(
                    case.problem,
                    time_limit=time_limit,
                    branch_gap=case.gap,
                    steps=settings.steps,
                    tuning=settings.tuning,
                )
                objective, bound = solution.objective, solution.bound
    except (TimeoutError, InfeasibleError, SolverFailedError):
        objective, bound = math.inf, -math.inf
    return Run(objective=objective, bound=bound, seconds=time.process_time() - begun)


def _priced(case: Case, settings: Settings, time_limit: float) -> tuple[float, float]:
    problem = case.problem
    choices = pareto.solve(
        problem,
        case.prices,
        gap=case.gap,
        time_limit=time_limit,
        enough=case.enough,
        steps=settings.steps,
        tuning=settings.tuning,
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


def compare(
    case: Case, variants: Sequence[Variant], *, time_limit: float, runs: int
) -> dict[str, Run]:
    """The median run with the default settings, under "", and of each variant, by its name.

    Variants that the search of this case does not come to are left out.
    """
    steps, tuning = _WatchedSteps(), _WatchedTuning()
    run(case, Settings(steps=steps, tuning=tuning), time_limit)  # Its seconds include imports.
    used = {STEPS[name] in steps.asked and name for name in STEPS} | vars(tuning)["read"]
    reached = [variant for variant in variants if variant.uses & used]
    made: dict[str, list[Run]] = {variant.name: [] for variant in [BASE, *reached]}
    for _ in range(runs):
        for number, variant in enumerate(reached):
            if number % _EVERY == 0:
                made[BASE.name].append(run(case, DEFAULT, time_limit))
            made[variant.name].append(run(case, variant.settings, time_limit))
    made[BASE.name] = made[BASE.name] or [run(case, DEFAULT, time_limit)]
    return {name: _median(of) for name, of in made.items()}


def _median(runs: Sequence[Run]) -> Run:
    """The first run, with the median of all seconds: the others find the same."""
    return replace(runs[0], seconds=median(one.seconds for one in runs))


def rows(case: Case, runs: Mapping[str, Run]) -> list[str]:
    """A line of Markdown for the default settings, and one per variant."""
    return [_row(case, name, one, runs[BASE.name]) for name, one in runs.items()]


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
            name or "(default)",
            f"{one.objective:.6g}" if found else "none",
            f"{one.bound:.6g}" if found and not case.prices else "",
            f"{one.gap:.2%}" if found and not case.prices else "",
            f"{one.seconds:.2f}",
            *changes,
        ]
    )
