"""How many micro-batches a step should have: lowers and plans a program for several numbers.

More micro-batches make a pipeline's bubble smaller and need less memory at a time; fewer keep the
devices better filled. Nothing but planning tells which is best, and every number is a program of
its own, lowered at the size of its micro-batch.

**Which are tried.** A handful of the divisors of the batch, evenly spread over them and the middle
ones first; then the neighbours of the best one, until none of them is better. A number is skipped,
once cut into layers, where its compute alone, split perfectly over all devices, would take longer
than the best step so far. One that cannot be planned is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.mpmd_types import Origin
from alpa.passes.cost.cluster import Cluster
from alpa.passes.stages.cost import computation_seconds, part_of
from alpa.runtime.planning import (
    Clock,
    Planned,
    PlanningError,
    Settings,
    clustered,
    plan_clustered,
)

_HANDFUL = 5


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of one number of micro-batches: a step, a problem, or neither, if skipped."""

    num_micro_batches: int
    bound: float | None = None
    """seconds that no plan undercuts"""
    seconds: float | None = None
    problem: PlanningError | None = None

    @property
    def is_skipped(self) -> bool:
        return self.seconds is None and self.problem is None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan, and all that was tried, in that order."""

    planned: Planned
    attempts: tuple[Attempt, ...]


def divisors(batch_size: int) -> list[int]:
    """The numbers of equal micro-batches that a batch can be cut into, ascending."""
    return [n for n in range(1, batch_size + 1) if batch_size % n == 0]


def handful(numbers: Sequence[int]) -> list[int]:
    """A few of ascending numbers, evenly spread over them, from the middle outwards."""
    last = len(numbers) - 1
    count = min(_HANDFUL, len(numbers))
    spread = sorted({round(i * last / max(1, count - 1)) for i in range(count)})
    return [numbers[i] for i in sorted(spread, key=lambda i: abs(2 * i - last))]


def lower_bound(module: ir.Module, cluster: Cluster, num_micro_batches: int) -> float:
    """Seconds of a step that no plan of a program cut into layers undercuts.

    Its roofline compute, split evenly over all devices, with nothing sent and nobody waiting.
    """
    seconds = 0.0
    for op in body(main_function(module)).operations:
        if isinstance(op, mpmd.NamedComputationOp):
            update = part_of(Origin.from_attr(op.attributes["origin"])) == "update"
            seconds += computation_seconds(op, cluster) * (1 if update else num_micro_batches)
    return seconds / cluster.num_devices


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
        ClusterError: there is no such cluster.
    """
    search = _Search(
        numbers=sorted(set(numbers)),
        lower=lower,
        settings=settings,
        cluster=Cluster.parse(settings.cluster),
        clock=clock,
        on_attempt=on_attempt,
    )
    return search.run()


@dataclass(kw_only=True)
class _Search:
    numbers: list[int]
    lower: Callable[[int], ir.Module]
    settings: Settings
    cluster: Cluster
    clock: Clock
    on_attempt: Callable[[Attempt], None]
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    best: Planned | None = None

    def run(self) -> Found:
        for number in handful(self.numbers):
            self._try(number)
        while (number := self._neighbour()) is not None:
            self._try(number)
        if self.best is None:
            raise self._nothing()
        return Found(planned=self.best, attempts=tuple(self.attempts.values()))

    def _neighbour(self) -> int | None:
        """One beside the best that has not been tried."""
        if self.best is None:
            return None
        at = self.numbers.index(self.best.plan.num_micro_batches)
        beside = self.numbers[max(0, at - 1) : at + 2]
        return next((number for number in beside if number not in self.attempts), None)

    def _try(self, number: int) -> None:
        attempt = Attempt(num_micro_batches=number)
        try:
            attempt = self._plan(attempt)
        except PlanningError as error:
            attempt = replace(attempt, problem=error)
        self.attempts[number] = attempt
        self.on_attempt(attempt)

    def _plan(self, attempt: Attempt) -> Attempt:
        number = attempt.num_micro_batches
        settings = replace(self.settings, num_micro_batches=number)
        with self.clock.phase("lower"):
            module = self.lower(number)
        layers = clustered(module, settings, self.clock)
        bound = lower_bound(layers, self.cluster, number)
        attempt = replace(attempt, bound=bound)
        step = float("inf") if self.best is None else self.best.plan.predicted_step_seconds
        if bound >= step:
            return attempt
        planned = plan_clustered(layers, settings, self.clock)
        seconds = planned.plan.predicted_step_seconds
        if seconds < step:
            self.best = planned
        return replace(attempt, seconds=seconds)

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
