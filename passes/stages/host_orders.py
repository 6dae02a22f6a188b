"""The stage DP where hosts are of several kinds: over the orders in which they may follow.

Each order is a stage DP of its own, and the search solves it anew whenever it has found more costs.
So one order is followed until the costs of its cut are known. Only then are the others compared
with that cut, and most of them have nothing better. This relies on costs that only grow, up to the
gap of the layers' costs: a bound gives way to larger bounds and to costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from alpa.passes.base import fresh, kept
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import (
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Solution,
    Stage,
)

Order = tuple[Group, ...]


class NoFasterCutError(Exception):
    """No cut is fast enough."""

    def __init__(self, bound: float) -> None:
        super().__init__(f"each cut takes at least {bound:.4g} s")
        self.bound = bound
        """what each cut takes at least, in seconds"""


class HostOrders:
    """Finds the best cut of all orders, for costs that grow from one problem to the next."""

    def __init__(self, orders: Iterable[Order], within: float) -> None:
        """Finds nothing yet. Cuts that take `within` seconds or more are of no use."""
        self._left = list(orders)
        """those that may have a better cut than the best one that is known"""
        self._within = within
        self._is_first = True
        self._best: tuple[float, Order] | None = None
        """the objective of the best cut whose costs are known, and its order"""
        self._slow = inf
        """a lower bound, in seconds, of the orders that were dropped as too slow"""
        self._refused: NoCutError | None = None
        """why an order has no cut"""

    def solve(self, problem: Problem, is_known: Callable[[tuple[Stage, ...]], bool]) -> Solution:
        """The best cut of all orders, or one whose costs are not known yet.

        The first call returns the best of all orders, which is a bound.

        Args:
            problem: with the hosts in any order.
            is_known: whether the costs of a cut are known; one without is returned at once.

        Raises:
            NoCutError: there is none.
            NoFasterCutError: all that are left take too long.
        """
        if self._is_first:
            self._is_first = False
            return self._first(problem)
        best: Solution | None = None
        while self._left:
            order = self._left[0]
            try:
                found = self._below(replace(problem, groups=order), self._best)
            except NoCutError as error:
                found = None
                self._refuse(error)
            if found is not None and found.objective >= self._within:
                self._slow = min(self._slow, found.objective)
            elif found is not None:
                if not is_known(found.stages):
                    return found
                best, self._best = found, (found.objective, order)
            del self._left[0]
        if best is not None:
            return best
        if self._best is None:
            if self._slow < inf:
                raise NoFasterCutError(self._slow)
            raise self._refusal()
        # It is that of an earlier problem, whose submeshes may have had other numbers.
        return stage_dp.solve(replace(problem, groups=self._best[1]))

    def _first(self, problem: Problem) -> Solution:
        best: tuple[Solution, Order] | None = None
        for order in self._left:
            known = None if best is None else (best[0].objective, best[1])
            try:
                found = self._below(replace(problem, groups=order), known)
            except NoCutError as error:
                self._refuse(error)
            else:
                best = best if found is None else (found, order)
        if best is None:
            raise self._refusal()
        self._left.remove(best[1])
        self._left.insert(0, best[1])
        return best[0]

    def _refuse(self, error: NoCutError) -> None:
        """Notes that an order has no cut; memory is the reason to report if it is one of any."""
        is_worse = isinstance(error, NoCutInMemoryError)
        if self._refused is None or is_worse > isinstance(self._refused, NoCutInMemoryError):
            self._refused = kept(error)

    def _refusal(self) -> NoCutError:
        assert self._refused is not None, "there was an order"
        return fresh(self._refused)

    def _below(self, problem: Problem, best: tuple[float, Order] | None) -> Solution | None:
        """The best cut, if it is better than that one. Raises NoCutError if there is none, and
        no other one is known."""
        if best is None:
            return stage_dp.solve(problem)
        return stage_dp.solve_below(problem, best[0])
