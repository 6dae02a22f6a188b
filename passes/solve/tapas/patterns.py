"""Which sharding patterns can stand side by side (TAPAS, sections 4.2.1 and 4.4).

A pattern in the paper is an SRC expression, `Y = C(Op(S/R(A), S/R(B)))`: each operand is split or a
replica, and a collective follows. A strategy of a node says the same: the layouts of its operands
and results; the node's cost has the collectives of its partial sums, and the matrix of an edge has
those that bring a result into the layout of an operand. Two patterns are incompatible where that
matrix is infinite. In the paper, resharding is no pattern's part, and most pairs are incompatible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Problem, with_strategies


@dataclass(frozen=True, kw_only=True, eq=False)
class Patterns:
    """A problem with the patterns that may be part of a valid strategy."""

    problem: Problem
    kept: tuple[np.ndarray, ...]
    """for each node, the numbers of its strategies before"""

    def chosen(self, choice: tuple[int, ...]) -> tuple[int, ...]:
        """A choice of the problem before."""
        return tuple(int(kept[k]) for kept, k in zip(self.kept, choice, strict=True))


def compatible(problem: Problem) -> Patterns:
    """Drops patterns that have no compatible pattern at one of their neighbours.

    Raises:
        InfeasibleError: a node has no pattern left.
    """
    allowed = [costs < inf for costs in problem.node_costs]
    around: list[list[int]] = [[] for _ in allowed]
    for number, edge in enumerate(problem.edges):
        around[edge.source].append(number)
        around[edge.target].append(number)
    finite = [edge.costs < inf for edge in problem.edges]
    waiting = {number for number, pairs in enumerate(finite) if not pairs.all()}
    waiting |= {n for v, mask in enumerate(allowed) if not mask.all() for n in around[v]}
    while waiting:
        number = waiting.pop()
        edge, pairs = problem.edges[number], finite[number]
        sides = ((edge.source, edge.target, pairs), (edge.target, edge.source, pairs.T))
        for node, other, table in sides:
            left = allowed[node] & table[:, allowed[other]].any(axis=1)
            if left.sum() < allowed[node].sum():
                allowed[node] = left
                waiting |= set(around[node])
    for node, mask in enumerate(allowed):
        if not mask.any():
            raise InfeasibleError((node,))
    kept = tuple(np.flatnonzero(mask) for mask in allowed)
    fewer = replace(
        problem,
        node_costs=tuple(c[left] for c, left in zip(problem.node_costs, kept, strict=True)),
        edges=tuple(
            Edge(e.source, e.target, e.costs[np.ix_(kept[e.source], kept[e.target])])
            for e in problem.edges
        ),
        usages=with_strategies(problem.usages, kept),
    )
    return Patterns(problem=fewer, kept=kept)
