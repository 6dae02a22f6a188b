"""Finds the number of micro-batches with the shortest predicted step, by planning several numbers.

More micro-batches reduce a pipeline's bubble and the memory in use; fewer keep the devices busier.
Only planning can compare them, and each number is a program of its own, lowered at the size of its
micro-batch.

Every allowed number is tried, from the middle outwards. Once a program is cut into layers, it is
skipped if its compute alone, split evenly over all devices, takes at least as long as the best step
so far: no plan can be predicted to be faster. A number that cannot be planned is skipped, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa.dialects import ir
from alpa.passes.base import NotFasterError, kept
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import Planned, PlanningError, Settings, plan


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The outcome of one number of micro-batches; exactly one of the three other fields is set."""

    num_micro_batches: int
    seconds: float | None = None
    """seconds of the planned step"""
    bound: float | None = None
    """a lower bound of the seconds of every plan, if the number was skipped"""
    problem: PlanningError | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan with the shortest predicted step, and all attempts in order."""

    planned: Planned
    attempts: tuple[Attempt, ...]


_TRIED = 1_000_000
"""The largest number that is tried as a divisor."""


def divisors(batch_size: int) -> list[int]:
    """The numbers of equal micro-batches that a batch can be split into, ascending.

    Of a batch above 10^12 samples, those whose parts are both larger than a million are left out:
    to find them takes too long.
    """
    small = np.arange(1, min(math.isqrt(batch_size), _TRIED) + 1)
    found = small[batch_size % small == 0].tolist()
    return sorted({*found, *(batch_size // n for n in found)})


def indivisible(batch_size: int, number: int) -> str:
    """What an error says of a number of micro-batches that does not divide the batch."""
    near = sorted(divisors(batch_size), key=lambda n: abs(n - number))[:3]
    *others, last = map(str, sorted(near))
    fitting = f"{', '.join(others)} or {last}" if others else last
    return (
        f"a batch of {batch_size} samples cannot be cut into {number} equal micro-batches, but "
        f"into {fitting}"
    )


def from_the_middle(numbers: Sequence[int]) -> list[int]:
    """Ascending numbers, from the middle outwards."""
    last = len(numbers) - 1
    return [numbers[i] for i in sorted(range(last + 1), key=lambda i: abs(2 * i - last))]


def best_number(
    numbers: Iterable[int],
    lower: Callable[[int], ir.Module],
    settings: Settings,
    clock: Clock,
    on_attempt: Callable[[Attempt], None] = lambda _: None,
    *,
    keep: bool = False,
) -> Found:
    """Finds the number of micro-batches with the shortest predicted step.

    Args:
        numbers: the allowed numbers.
        lower: lowers the program for a number of micro-batches, at the size of one.
        settings: what to plan for, except for the number of micro-batches.
        clock: adds up the seconds of all attempts.
        on_attempt: called with each attempt when it ends.
        keep: whether to keep what questions about the plan need.

    Raises:
        PlanningError: none of them can be planned. The message gives the reason for the smallest
            micro-batches, which need the least memory.
    """
    search = _Search(
        numbers=sorted(set(numbers)),
        lower=lower,
        settings=settings,
        clock=clock,
        on_attempt=on_attempt,
        keep=keep,
    )
    return search.run()


@dataclass(kw_only=True)
class _Search:
    numbers: list[int]
    lower: Callable[[int], ir.Module]
    settings: Settings
    clock: Clock
    on_attempt: Callable[[Attempt], None]
    keep: bool
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    best: Planned | None = None

    def run(self) -> Found:
        for number in from_the_middle(self.numbers):
            self.attempts[number] = self._try(number)
            self.on_attempt(self.attempts[number])
        if self.best is None:
            raise self._no_plan()
        return Found(planned=self.best, attempts=tuple(self.attempts.values()))

    def _try(self, number: int) -> Attempt:
        settings = replace(self.settings, num_micro_batches=number)
        limit = None if self.best is None else self.best.plan.predicted_step_seconds
        try:
            with self.clock.phase("lower"):
                module = self.lower(number)
            planned = plan(module, settings, self.clock, faster_than=limit, keep=self.keep)
        except PlanningError as error:
            if isinstance(error.reason, NotFasterError):
                return Attempt(num_micro_batches=number, bound=error.reason.bound)
            return Attempt(num_micro_batches=number, problem=kept(error))
        seconds = planned.plan.predicted_step_seconds
        if limit is None or seconds < limit:
            self.best = planned
        return Attempt(num_micro_batches=number, seconds=seconds)

    def _no_plan(self) -> PlanningError:
        """The error if there is no plan at all."""
        smallest = self.attempts[self.numbers[-1]]
        assert smallest.problem is not None
        first, *others = smallest.problem.diagnostics
        tried = ", ".join(str(number) for number in sorted(self.attempts))
        message = (
            f"no number of micro-batches can be planned (tried {tried}); with "
            f"{smallest.num_micro_batches}, the smallest micro-batches: {first.message}"
        )
        return PlanningError((replace(first, message=message), *others))
