"""Finds shardings as TAPAS does: mined subgraphs, a decision tree, and a ranked list.

1. `mining`: corresponding nodes of a repeated subgraph take one strategy (section 4.3).
2. `patterns`: patterns without a compatible neighbour are dropped (section 4.2.1).
3. `tree`: strategies of the unique subgraphs are explored, and stopped early (section 4.4).
4. The strategies that differ in their decisions are ranked by their cost (section 4.6). The first
   one that fits into memory is the solution.

The exhaustive variant (TAPAS-ES, section 5.3) folds nothing, and its list is proven: `widen`. Its
first strategy is the optimum of the whole problem without memory.

The lower bounds of the tree are those of the costs as `bound.Messages` shifts them: the same for
each strategy, and nearer to what the strategies cost.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from alpa.passes.solve.sharding.bound import Messages
from alpa.passes.solve.sharding.problem import (
    Memory,
    Problem,
    Solution,
    verify,
)
from alpa.passes.solve.sharding.tie import tie
from alpa.passes.solve.tapas.mining import mine
from alpa.passes.solve.tapas.patterns import compatible
from alpa.passes.solve.tapas.results import Candidate, Found, NoCandidateFitsError
from alpa.passes.solve.tapas.settings import Settings
from alpa.passes.solve.tapas.tree import Explored, Limits, explore
from alpa.passes.solve.tapas.widen import prove


def solve(
    problem: Problem,
    *,
    decisions: Collection[int] = (),
    tensors: Collection[int] = (),
    settings: Settings | None = None,
    time_limit: float = inf,
    gap: float = 0.0,
) -> Found:
    """The cheapest strategy that fits, of the ranked list.

    Args:
        problem: the whole problem.
        decisions: the nodes, such as weights, in which ranked strategies differ; by default all.
        tensors: the nodes that are no ops (`mining.mine`).
        settings: by default those of the pruned variant.
        time_limit: seconds after which the sweeps and an exhaustive search end. The tree of the
            pruned variant has a limited width and is explored to its end.
        gap: the relative distance from the bound that `Solution.status` calls `within_gap`.

    Raises:
        InfeasibleError: no strategy has compatible patterns only.
        NoCandidateFitsError: none of the ranked strategies fits into memory.
        SolverFailedError: the pruned search explored incompatible branches only.
        NotProvenError: the exhaustive search has too many branches, or its time ended.
    """
    problem.check()
    settings = settings or Settings()
    start = time.monotonic()
    mined = None
    if settings.variant == "pruned":
        mined = mine(
            problem, min_support=settings.min_support, min_size=settings.min_size, tensors=tensors
        )
    mining_seconds = time.monotonic() - start
    nodes = range(len(problem.node_costs))
    colors = mined.colors(len(nodes)) if mined else nodes
    ranked, explored = _ranked(
        problem, colors, decisions or nodes, settings, deadline=start + time_limit
    )
    fitting = [one for one in ranked if one.peak_bytes <= problem.memory_limit]
    if not fitting:
        smallest = min(one.peak_bytes for one in ranked)
        raise NoCandidateFitsError(len(ranked), smallest, problem.memory_limit)
    best = fitting[0]
    solution = Solution(
        choice=best.choice,
        objective=best.seconds,
        bound=min(explored.beyond, ranked[0].seconds),
        wanted_gap=gap,
        peak_bytes=best.peak_bytes,
        seconds=time.monotonic() - start,
        variables=problem.num_variables,
    )
    verify(problem, solution)
    return Found(
        solution=solution,
        ranked=ranked,
        mined=mined,
        mining_seconds=mining_seconds,
        searched_nodes=len(set(colors)),
        width=explored.width,
        counts=explored.counts,
    )


def _ranked(
    problem: Problem,
    colors: Sequence[int],
    decisions: Collection[int],
    settings: Settings,
    *,
    deadline: float,
) -> tuple[tuple[Candidate, ...], Explored]:
    """The ranked list of strategies that tie nodes of a color, and what the tree says of it."""
    folded, node_class = tie(problem, colors)
    patterns = compatible(folded)
    shifted = _shifted(patterns.problem, settings, deadline)
    search, limits = explore, Limits(ranked=settings.ranked, width=settings.width)
    if settings.variant == "exhaustive":
        search, limits = prove, replace(limits, deadline=deadline)
    explored = search(shifted, decisions={node_class[v] for v in decisions}, limits=limits)
    memory = Memory(problem)
    ranked: list[Candidate] = []
    for few in explored.choices:
        of_folded = patterns.chosen(few)
        choice = tuple(of_folded[c] for c in node_class)
        peak, _ = memory.peak(choice)
        ranked.append(Candidate(choice=choice, seconds=problem.cost(choice), peak_bytes=peak))
    # The tree adds up shifted costs, in another order.
    ranked.sort(key=lambda one: one.seconds)
    return tuple(ranked), explored


def _shifted(problem: Problem, settings: Settings, deadline: float) -> Problem:
    """The problem with costs that bound the rest of the tree well."""
    messages, last = Messages(problem), -inf
    for sweep in range(settings.most_sweeps):
        messages.sweep(forward=True)
        messages.sweep(forward=False)
        if sweep % settings.sweeps == settings.sweeps - 1:
            bound, _ = messages.bound()
            if bound - last <= settings.gain * abs(bound) or time.monotonic() > deadline:
                break
            last = bound
    return messages.problem()
