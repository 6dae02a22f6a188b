"""Reduced-cost fixing at memory prices: forbids what no better choice than the best can take.

At prices whose relaxation has bound b, a strategy or pair that costs more above its minimum than
the best choice above b is in no better choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import numpy as np

from alpa.passes.solve.sharding.bound import dual_bound, prune
from alpa.passes.solve.sharding.problem import Memory, Problem


def priced(problem: Problem, memory: Memory, prices: Mapping[int, float]) -> Problem:
    """The problem without memory where bytes cost what they are priced, at each time."""
    costs, edges = list(problem.node_costs), list(problem.edges)
    numbers = problem.edge_numbers()
    for moment, price in prices.items():
        if price > 0:
            for nodes, held in memory.row(moment).items():
                if len(nodes) == 1:
                    costs[nodes[0]] = costs[nodes[0]] + price * held
                    continue
                number = numbers[nodes]
                edge = edges[number]
                paid = price * (held if edge.source == nodes[0] else held.T)
                edges[number] = replace(edge, costs=edge.costs + paid)
    return Problem(node_costs=tuple(c.astype(float) for c in costs), edges=tuple(edges))


def without_dear(problem: Problem, shifted: Problem, paid: float, value: float) -> Problem:
    """The problem, with its memory, less what only choices of ``value`` and more take.

    ``shifted``, the problem at some prices, costs ``paid`` more than the problem at the limit.
    """
    slack = value - (dual_bound(shifted) - paid) + 1e-9 * (abs(value) + paid)
    allowed, _ = prune(shifted, slack)
    nodes = tuple(
        np.where(np.isfinite(new), old, inf)
        for new, old in zip(allowed.node_costs, problem.node_costs, strict=True)
    )
    edges = tuple(
        replace(old, costs=np.where(np.isfinite(new.costs), old.costs, inf))
        for new, old in zip(allowed.edges, problem.edges, strict=True)
    )
    return replace(problem, node_costs=nodes, edges=edges)


def variables_left(problem: Problem) -> int:
    """Strategies and pairs that are not forbidden."""
    nodes = sum(int(np.isfinite(costs).sum()) for costs in problem.node_costs)
    return nodes + sum(int(np.isfinite(edge.costs).sum()) for edge in problem.edges)
