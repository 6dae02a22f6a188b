"""What a search of TAPAS finds: the ranked list, and the statistics."""

from __future__ import annotations

from dataclasses import dataclass

from alpa.passes.solve.sharding.problem import InfeasibleError, Solution
from alpa.passes.solve.tapas.mining import Mined
from alpa.passes.solve.tapas.tree import Counts


class NoCandidateFitsError(InfeasibleError):
    """No strategy of the ranked list fits into memory; others may."""

    def __init__(self, ranked: int, needed: float, limit: float) -> None:
        super().__init__(())
        self.args = (
            f"none of {ranked} ranked candidates fits: the smallest needs {needed:.6g} bytes, "
            f"{limit:.6g} allowed",
        )
        self.ranked, self.needed, self.limit = ranked, needed, limit

    def __reduce__(self) -> tuple[type[NoCandidateFitsError], tuple[object, ...]]:
        return type(self), (self.ranked, self.needed, self.limit)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A strategy of the ranked list."""

    choice: tuple[int, ...]
    seconds: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """The ranked list, the solution in it, and how it was found."""

    solution: Solution
    ranked: tuple[Candidate, ...]
    mined: Mined | None
    """None: the exhaustive variant folds nothing"""
    mining_seconds: float
    searched_nodes: int
    """of the folded problem"""
    width: int
    """of the tree: the exhaustive variant's is the one that proves the list"""
    counts: Counts
    """of all trees"""
