"""Solutions of meshes, for equal meshes and for those with more or less in memory.

`alpa` plans some cuts of the same layers, and often some of their stages are the same. Stages of
one plan that hold equal layers differ in what they keep for the micro-batches in flight. Where
memory decides nothing, the solution of one is that of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace

from alpa.passes.solve.sharding.problem import Memory, Problem, Solution, verify


class Solved:
    """Solutions by the problem and the settings of the solver."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._found: dict[Hashable, Future[Solution]] = {}

    def once(
        self, problem: Problem, settings: Hashable, begin: Callable[[], Future[Solution]]
    ) -> Callable[[], Future[Solution]]:
        """Begins to solve a problem that is not known. The result gives what was begun.

        If there is an earlier problem with the same costs, the result waits for its solution, and
        begins only if that is not proven to be this problem's, too. It waits for the first one, or
        for the first that it began itself. So call results when all problems are posed, those with
        more memory left first.
        """
        whole = problem.digest(), settings
        known = self._found.get(whole)
        # A search that has not ended may belong to processes that are gone.
        if known is not None and known.done() and not _failed(known):
            return lambda: known
        costs = replace(problem, usages=()).digest(), settings
        first = self._found.get(costs)
        if first is None or (first.done() and _failed(first)):
            begun = self._found[whole] = self._found[costs] = begin()
            return lambda: begun

        def later() -> Future[Solution]:
            other = self._found[costs]
            solution = _shared(problem, other)
            if solution is None:
                found = begin()
                if other is first:
                    self._found[costs] = found
            else:
                found = Future[Solution]()
                found.set_result(solution)
            self._found[whole] = found
            return found

        return later


def _failed(search: Future[Solution]) -> bool:
    return search.cancelled() or search.exception() is not None


def _shared(problem: Problem, other: Future[Solution]) -> Solution | None:
    """The solution of another problem with the same costs, if it is this one's, too."""
    if _failed(other):
        return None
    solution = other.result()
    if not solution.is_free or solution.status != "optimal":
        return None
    peak = Memory(problem).peak(solution.choice)[0]
    if peak > problem.memory_limit:
        return None
    found = replace(solution, peak_bytes=peak)
    verify(problem, found)
    return found
