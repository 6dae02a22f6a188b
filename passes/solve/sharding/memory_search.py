"""What a search within memory knows: the assignments seen, the best that fits, bound and prices.

Every assignment on the way becomes a plane for ``prices``. One above the limit is repaired, one
within it is improved (``repair``). A time becomes a row where an assignment first breaks the limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

import numpy as np

from alpa.passes.solve.sharding.bound import Messages
from alpa.passes.solve.sharding.prices import Plane
from alpa.passes.solve.sharding.problem import (
    Edge,
    Memory,
    OutOfMemoryError,
    Problem,
    Solution,
)
from alpa.passes.solve.sharding.repair import improve_within, repair
from alpa.passes.solve.sharding.settings import Settings, Step


class SolveFree(Protocol):
    """Solves a problem without memory."""

    def __call__(self, other: Problem, wanted: float, enough: float = inf, /) -> Solution:
        """Relaxations go on until the gap is ``wanted`` or the bound ``enough``."""
        ...


@dataclass
class MemorySearch:
    """What is known about one problem, reduced by presolve."""

    problem: Problem
    solve_free: SolveFree
    deadline: float
    gap: float
    settings: Settings
    best: tuple[int, ...] | None = None
    value: float = inf
    """of the best choice known, be it one of this problem or not"""
    bound: float = -inf
    prices: dict[int, float] = field(default_factory=dict[int, float])
    """of the best bound, per byte at each time that is a row"""
    planes: list[Plane] = field(default_factory=list[Plane])
    seen: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """choices, as those of ``planes``"""
    messages: Messages | None = None
    """of the last prices that dual ascent alone looked at"""

    def __post_init__(self) -> None:
        self.memory = Memory(self.problem)
        self.index = {int(t): i for i, t in enumerate(self.memory.times)}

    @property
    def is_large(self) -> bool:
        """Whether visits node by node take too long."""
        return len(self.problem.node_costs) > self.settings.tuning.large

    @property
    def is_far(self) -> bool:
        """Whether no choice is known whose cost is near the bound."""
        far = self.settings.tuning.wide_gap * abs(self.value)
        return self.value == inf or self.value - self.bound > far

    @property
    def done(self) -> bool:
        return self.closed or time.monotonic() > self.deadline

    @property
    def closed(self) -> bool:
        return self.value < inf and self.value - self.bound <= self.gap * abs(self.value)

    def see(self, choice: tuple[int, ...], *, far: bool = False) -> None:
        """Notes a choice: a plane, perhaps a new row, perhaps, when repaired, the best so far.

        One that is far above the limit is repaired only if asked: that is slow, and becomes dear.
        """
        used = self.memory.over_time(choice)
        self._add_plane(choice, used)
        worst = int(np.argmax(used))
        if used[worst] <= self.problem.memory_limit:
            self.offer(choice)
            return
        tuning, limit = self.settings.tuning, self.problem.memory_limit
        if self.is_large:
            near = used[worst] <= (1 + tuning.nearly) * limit
        else:
            near = far or used[worst] <= tuning.far * limit
        if near:
            # The first one within memory is worth being late for: it takes a second at most.
            until = self.deadline if self.best is not None else inf
            repaired = repair(
                self.problem, self.memory, choice, deadline=until, settings=self.settings
            )
            if repaired is not None:
                self.offer(repaired)
        moment = int(self.memory.times[worst])
        if moment not in self.prices:
            self.prices[moment] = 0.0
            if self.value == inf and Step.ROW_CHECK in self.settings.steps and not self.is_large:
                self._check_row(moment)

    def offer(self, choice: tuple[int, ...]) -> None:
        """Takes a choice within memory, improved, where it is better than the best."""
        if not self.is_large:
            choice = improve_within(
                self.problem, self.memory, choice, deadline=self.deadline, settings=self.settings
            )
        self.take(choice)

    def take(self, choice: tuple[int, ...]) -> None:
        """Takes a choice within memory where it is better than the best."""
        cost = self.problem.cost(choice)
        if cost < self.value:
            self.best, self.value = choice, cost
            self._add_plane(choice, self.memory.over_time(choice))

    def _add_plane(self, choice: tuple[int, ...], used: np.ndarray) -> None:
        cost = self.problem.cost(choice)
        if cost < inf:
            self.planes.append(Plane(cost, used))
            self.seen.append(choice)

    def _check_row(self, moment: int) -> None:
        """Looks for the choice that holds least at a time; raises where even that is too much."""
        problem, row = self.problem, self.memory.row(moment)
        least = Problem(
            node_costs=tuple(
                np.where(np.isfinite(costs), row.get((v,), 0.0), inf)
                for v, costs in enumerate(problem.node_costs)
            ),
            edges=(
                *(
                    replace(e, costs=np.where(np.isfinite(e.costs), 0.0, inf))
                    for e in problem.edges
                ),
                *(Edge(vs[0], vs[1], held) for vs, held in row.items() if len(vs) == 2),
            ),
        )
        try:
            found = self.solve_free(least, 1e-9)
        except TimeoutError:
            return
        if found.bound > problem.memory_limit * (1 + 1e-12):
            raise OutOfMemoryError(found.bound, problem.memory_limit, moment, ())
        self.see(found.choice)
