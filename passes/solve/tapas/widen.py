"""Widens the decision tree until its ranked list is proven (TAPAS-ES, section 5.3).

An exhaustive search explores all branches. Most need no look: a strategy below a branch costs at
least what the branch costs so far and the lower bound of the rest. If no branch beyond the width
can lead to less than the worst of the list costs, the list is the one that all branches give.
Otherwise the tree is explored again with a larger width, up to the worst of the list.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import Problem
from alpa.passes.solve.tapas.tree import (
    MOST_BRANCHES,
    Counts,
    Explored,
    Limits,
    TooManyBranchesError,
    explore,
)

_GROWTH = 10
"""Of the width, from tree to tree."""


class NotProvenError(SolverFailedError):
    """The search ended before its list was proven."""


def prove(problem: Problem, *, decisions: Collection[int], limits: Limits) -> Explored:
    """The proven list of the cheapest strategies that differ in the decisions.

    `limits.width` is that of the first tree. The counts are those of all trees.

    Raises:
        InfeasibleError: no strategy is valid.
        NotProvenError: a level has too many branches, or the deadline came.
    """
    best: Explored | None = None
    counts = Counts()
    while True:
        try:
            found = explore(problem, decisions=decisions, limits=limits)
        except (TooManyBranchesError, TimeoutError) as error:
            raise NotProvenError(f"{error}; {_so_far(best)}") from error
        except SolverFailedError:
            # All branches within the width are incompatible. A level has no more than these.
            if limits.width > MOST_BRANCHES:
                raise
        else:
            counts += found.counts
            # A wider tree may lose some of the list to better branches that end as incompatible.
            if best is None or len(found.costs) >= len(best.costs):
                if found.is_proven:
                    return replace(found, counts=counts)
                best = found
                limits = replace(limits, most=best.worst)
        limits = replace(limits, width=limits.width * _GROWTH)


def _so_far(best: Explored | None) -> str:
    if best is None:
        return "it found no strategy before"
    return (
        f"with a width of {best.width:,} it found {len(best.costs)} strategies of "
        f"{best.costs[0]:.6g} to {best.worst:.6g} s, but others may cost {best.beyond:.6g} s"
    )
