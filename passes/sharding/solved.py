"""Solutions of meshes, for equal meshes in other cuts of the same program.

`alpa` plans some cuts of the same layers, and often some of their stages are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future

from alpa.passes.solve.sharding.problem import Solution


class Solved:
    """Solutions by the problem and the settings of the solver."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._found: dict[Hashable, Future[Solution]] = {}

    def once(self, key: Hashable, begin: Callable[[], Future[Solution]]) -> Future[Solution]:
        """A solution that was found before, else the one that is searched now."""
        known = self._found.get(key)
        # A search that has not ended may belong to processes that are gone.
        if known is None or not known.done() or known.cancelled() or known.exception() is not None:
            known = self._found[key] = begin()
        return known
