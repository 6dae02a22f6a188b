"""The best choice that is made of the strategies of several choices, without memory.

Choices read off a relaxation are each wrong somewhere else. With a handful of strategies per node
the problem falls to presolve and tables (fusion moves: Lempitsky et al. 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from alpa.passes.solve.sharding.buckets import eliminate
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.problem import Problem, with_strategies
from alpa.passes.solve.sharding.settings import DEFAULT, Settings


def fuse(
    problem: Problem, choices: Sequence[tuple[int, ...]], *, settings: Settings = DEFAULT
) -> tuple[int, ...]:
    """No worse than any of the choices; the best of them where the tables would be too large.

    One of them at least has to be of finite cost.
    """
    if not settings.steps.fusion:
        return min(choices, key=problem.cost)
    few, taken = made_of(replace(problem, usages=()), choices)
    reduction = Reduction(few, settings).run()
    chosen: dict[int, int] = {}
    for core in reduction.cores():
        best = eliminate(core.problem, max_entries=settings.tuning.fused_entries)
        if best is None:
            return min(choices, key=problem.cost)
        chosen |= core.numbered(best)
    return tuple(int(k[i]) for k, i in zip(taken, reduction.lift(chosen), strict=True))


def made_of(
    problem: Problem, choices: Sequence[tuple[int, ...]]
) -> tuple[Problem, list[np.ndarray]]:
    """The problem with the strategies that some choice takes, and which these are, by node."""
    taken = [np.unique(strategies) for strategies in zip(*choices, strict=True)]
    few = replace(
        problem,
        node_costs=tuple(c[k] for c, k in zip(problem.node_costs, taken, strict=True)),
        edges=tuple(
            replace(e, costs=e.costs[np.ix_(taken[e.source], taken[e.target])])
            for e in problem.edges
        ),
        usages=with_strategies(problem.usages, taken),
    )
    return few, taken
