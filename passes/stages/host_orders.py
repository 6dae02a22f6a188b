"""The stage DP where hosts are of several kinds: over the orders in which they may follow.

Each order is a stage DP of its own, and the search solves it anew whenever it has found more costs.
So one order is followed until the costs of its cut are known. Only then are the others compared
with that cut, and most of them have nothing better. This relies on costs that only grow: a bound
gives way to larger bounds and to costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from alpa.passes.base import fresh, kept
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import NoCutError, Problem, Solution, Stage

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
        """Of some orders; cuts that take `within` seconds or more are of no use."""
        self._left = list(orders)
        """those that may have a better cut than the best one that is known"""
        self._within = within
        self._is_first = True
        self._best: tuple[float, Order] | None = None
        """the objective of the best cut whose costs are known, and its order"""
        self._slow = inf
        """what cuts of the orders take at least that are of no use"""

    def solve(self, problem: Problem, is_known: Callable[[tuple[Stage, ...]], bool]) -> Solution:
        """The best cut of all orders, or one whose costs are not known yet.

        The first one is the best in any case, and so bounds all cuts.

        Args:
            problem: with the hosts in any order.
            is_known: whether the costs of a cut are known. If not, it is the next problem's turn.

        Raises:
            NoCutError: there is none.
            NoFasterCutError: all that are left take too long.
        """
        if self._is_first:
            self._is_first = False
            return self._first(problem)
        best: Solution | None = None
        refused: NoCutError | None = None
        while self._left:
            order = self._left[0]
            try:
                found = self._below(replace(problem, groups=order), self._best)
            except NoCutError as error:
                refused, found = refused or kept(error), None
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
            assert refused is not None, "there was an order"
            raise fresh(refused)
        # It is that of an earlier problem, whose submeshes may have had other numbers.
        return stage_dp.solve(replace(problem, groups=self._best[1]))

    def _first(self, problem: Problem) -> Solution:
        best: tuple[Solution, Order] | None = None
        refused: NoCutError | None = None
        for order in self._left:
            known = None if best is None else (best[0].objective, best[1])
            try:
                found = self._below(replace(problem, groups=order), known)
            except NoCutError as error:
                refused = refused or kept(error)
            else:
                best = best if found is None else (found, order)
        if best is None:
            assert refused is not None, "there was an order"
            raise fresh(refused)
        self._left.remove(best[1])
        self._left.insert(0, best[1])
        return best[0]

    def _below(self, problem: Problem, best: tuple[float, Order] | None) -> Solution | None:
        """The best cut, if it is better than that one. Raises NoCutError if there is none, and
        no other one is known."""
        if best is None:
            return stage_dp.solve(problem)
        return stage_dp.solve_below(problem, best[0])
