"""Combines the strategies of known assignments into one that fits in memory.

The solutions of the priced problems lie on both sides of the limit: cheap and too large, or
expensive and small. Good assignments mix both. Branch and bound on the few strategies that these
solutions use finds one fast (a restricted master heuristic; with an incumbent, RINS: Danna et al.
2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alpa.passes.solve.sharding.fuse import made_of
from alpa.passes.solve.sharding.mip import branch
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.problem import (
    InfeasibleError,
    Memory,
    Problem,
    Row,
)
from alpa.passes.solve.sharding.settings import DEFAULT, Settings


def combine(
    problem: Problem,
    choices: Sequence[tuple[int, ...]],
    times: Iterable[int],
    *,
    deadline: float,
    gap: float,
    enough: float,
    settings: Settings = DEFAULT,
) -> tuple[int, ...] | None:
    """An assignment that fits at the given times, or None if HiGHS finds none within its limits.

    The search ends when an assignment costs at most ``enough``, or when ``gap`` is proven.
    """
    few, taken = made_of(problem, choices)
    try:
        reduction = Reduction(few, settings).run()
        rest = reduction.rest()
        if rest.nodes:
            found = branch(
                rest.problem,
                deadline=deadline,
                relative_gap=gap,
                rows=rows_at(rest.problem, times),
                capacity=min(problem.memory_limit, 1.0),
                max_nodes=settings.tuning.combination_nodes,
                enough=enough,
                settings=settings,
            )
            if found is None:
                return None
            whole = reduction.lift(rest.numbered(found.choice))
        else:
            whole = reduction.lift()
    except InfeasibleError:
        return None
    return tuple(int(k[i]) for k, i in zip(taken, whole, strict=True))


def rows_at(problem: Problem, times: Iterable[int]) -> list[Row]:
    """Bytes of the nodes at the given times, as shares of the limit if the limit is above 1."""
    memory, unit = Memory(problem), max(problem.memory_limit, 1.0)
    return [{nodes: held / unit for nodes, held in memory.row(t).items()} for t in times]
