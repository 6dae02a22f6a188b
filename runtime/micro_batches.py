"""How many micro-batches a step should have: lowers and plans a program for several numbers.

More micro-batches make a pipeline's bubble smaller and need less memory at a time; fewer keep the
devices better filled. Nothing but planning tells which is best, and every number is a program of
its own, lowered at the size of its micro-batch.

Every number that may be taken is tried, the middle ones first. A number is skipped, once it is cut
into layers, if its compute alone, split evenly over all devices, takes at least as long as the best
step so far: no plan for it is better. A number that cannot be planned is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from alpa.dialects import ir
from alpa.passes.base import NotFasterError
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import Planned, PlanningError, Settings, plan


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of one number of micro-batches: one of the three others is known."""

    num_micro_batches: int
    seconds: float | None = None
    """of the planned step"""
    bound: float | None = None
    """seconds that no plan undercuts, if it was skipped"""
    problem: PlanningError | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan, and all that was tried, in that order."""

    planned: Planned
    attempts: tuple[Attempt, ...]


def divisors(batch_size: int) -> list[int]:
    """The numbers of equal micro-batches that a batch can be cut into, ascending."""
    return [n for n in range(1, batch_size + 1) if batch_size % n == 0]


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
) -> Found:
    """The number of micro-batches with the shortest predicted step.

    Args:
        numbers: those that may be taken.
        lower: the program for a number of micro-batches, at the size of one.
        settings: what to plan for; their own number is not used.
        clock: adds up the seconds of all attempts.
        on_attempt: hears of each one when it ends.

    Raises:
        PlanningError: none of them can be planned; says why of the one with the smallest
            micro-batches, which need the least memory.
    """
    search = _Search(
        numbers=sorted(set(numbers)),
        lower=lower,
        settings=settings,
        clock=clock,
        on_attempt=on_attempt,
    )
    return search.run()


@dataclass(kw_only=True)
class _Search:
    numbers: list[int]
    lower: Callable[[int], ir.Module]
    settings: Settings
    clock: Clock
    on_attempt: Callable[[Attempt], None]
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    best: Planned | None = None

    def run(self) -> Found:
        for number in from_the_middle(self.numbers):
            self.attempts[number] = self._try(number)
            self.on_attempt(self.attempts[number])
        if self.best is None:
            raise self._nothing()
        return Found(planned=self.best, attempts=tuple(self.attempts.values()))

    def _try(self, number: int) -> Attempt:
        settings = replace(self.settings, num_micro_batches=number)
        limit = None if self.best is None else self.best.plan.predicted_step_seconds
        try:
            with self.clock.phase("lower"):
                module = self.lower(number)
            planned = plan(module, settings, self.clock, faster_than=limit)
        except PlanningError as error:
            if isinstance(error.reason, NotFasterError):
                return Attempt(num_micro_batches=number, bound=error.reason.bound)
            return Attempt(num_micro_batches=number, problem=error)
        seconds = planned.plan.predicted_step_seconds
        if limit is None or seconds < limit:
            self.best = planned
        return Attempt(num_micro_batches=number, seconds=seconds)

    def _nothing(self) -> PlanningError:
        """Why there is no plan at all."""
        smallest = self.attempts[self.numbers[-1]]
        assert smallest.problem is not None
        first, *others = smallest.problem.diagnostics
        tried = ", ".join(str(number) for number in sorted(self.attempts))
        message = (
            f"no number of micro-batches can be planned (tried {tried}); with "
            f"{smallest.num_micro_batches}, the smallest ones: {first.message}"
        )
        return PlanningError((replace(first, message=message), *others))
