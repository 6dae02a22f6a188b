"""The best choice that is made of the strategies of several choices.

Choices read off a relaxation are each wrong somewhere else. With a handful of strategies per node
the problem falls to presolve and tables (``fuse``; fusion moves: Lempitsky et al. 2010).

Within memory, the solutions of the priced problems straddle the limit: cheap and too large, or
expensive and small. Good choices take some of both, so branch and bound on the few strategies that
some of them took finds one fast (``combine``, a restricted master heuristic; with an incumbent,
RINS: Danna et al. 2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from alpa.passes.solve.sharding.buckets import eliminate
from alpa.passes.solve.sharding.mip import branch
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem, with_strategies
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


def fuse(
    problem: Problem, choices: Sequence[tuple[int, ...]], *, settings: Settings = DEFAULT
) -> tuple[int, ...]:
    """No worse than any of the choices; the best of them where the tables would be too large.

    One of them at least has to be of finite cost.
    """
    if Step.FUSION not in settings.steps:
        return min(choices, key=problem.cost)
    strategies = np.array(choices)
    nodes = np.flatnonzero((strategies != strategies[0]).any(axis=0))
    if not nodes.size:
        return tuple(choices[0])
    few, taken = _where_they_differ(problem, strategies, nodes)
    reduction = Reduction(few, settings).run()
    chosen: dict[int, int] = {}
    for core in reduction.cores():
        best = eliminate(core.problem, max_entries=settings.tuning.fused_entries)
        if best is None:
            return min(choices, key=problem.cost)
        chosen |= core.numbered(best)
    fused = strategies[0].copy()
    fused[nodes] = [k[i] for k, i in zip(taken, reduction.lift(chosen), strict=True)]
    return tuple(fused.tolist())


def _where_they_differ(
    problem: Problem, strategies: np.ndarray, nodes: np.ndarray
) -> tuple[Problem, list[np.ndarray]]:
    """The problem of these nodes alone, with the strategies that some choice ``[choice, node]``
    takes, and which these are; on all other nodes, the choices agree."""
    same: list[int] = strategies[0].tolist()
    number = dict(zip(nodes.tolist(), range(nodes.size), strict=True))
    taken = [np.unique(strategies[:, node]) for node in nodes]
    costs: list[np.ndarray] = [
        problem.node_costs[node][k] for node, k in zip(nodes.tolist(), taken, strict=True)
    ]
    edges: list[Edge] = []
    for edge in problem.edges:
        source, target = number.get(edge.source), number.get(edge.target)
        if source is not None and target is not None:
            both = edge.costs[taken[source][:, None], taken[target]]
            edges.append(Edge(source, target, both))
        elif source is not None:
            costs[source] = costs[source] + edge.costs[taken[source], same[edge.target]]
        elif target is not None:
            costs[target] = costs[target] + edge.costs[same[edge.source], taken[target]]
    return Problem(node_costs=tuple(costs), edges=tuple(edges)), taken


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
    """A choice that fits at the given times; None where HiGHS finds none in its nodes or in time.

    The search ends at a choice that costs ``enough`` or less, or with a proven ``gap``.
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
                times=times,
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
