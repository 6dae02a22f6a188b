"""Folds equal parts of a sharding problem, layers above all, so that its size stops growing.

TAPAS ties the variables of layers that look alike. Here alike means: same costs, same bytes, and
neighbours alike through the same matrices, up to a radius (colour refinement, Weisfeiler and Leman
1968).
All nodes of a colour take one strategy. Every choice of the folded problem is a choice of the
whole one with the same cost, so folding can only miss choices that treat equal layers
differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa.passes.solve.sharding.problem import Problem, Usage
from alpa.passes.solve.sharding.terms import Terms

RADIUS = 5
"""Rounds of refinement: nodes that differ only further away than this are tied. The 4,270 nodes of
a GPT-2.6B step for one host of 8 fold to 384, 496, 621, 763 and 1,023 at radius 4, 5, 6, 7 and 9,
and the cost is the same to the 0.2 % to which it was proven; GPT-39B on 8x8 devices costs 5 % more
at 4 than at 5 and 0.5 % less at 7, where the search takes three times as long."""


def fold(
    problem: Problem, radius: int = RADIUS, *, like: Problem | None = None
) -> tuple[Problem, list[int]]:
    """The folded problem, and for each node of the whole one its node there.

    `like` has the same nodes and edges, and says instead of the problem what is alike: where nodes
    stand for several and cost as much together, it has the costs of one.
    """
    whole, problem = problem, like or problem
    kinds: dict[bytes | tuple[object, ...], int] = {}

    def number(key: bytes | tuple[object, ...]) -> int:
        return kinds.setdefault(key, len(kinds))

    held: list[set[bytes]] = [set() for _ in problem.node_costs]
    together: dict[tuple[int, ...], set[bytes]] = {}
    for usage, signature in zip(problem.usages, _signatures(problem), strict=True):
        if len(usage.nodes) == 1:
            held[usage.nodes[0]].add(signature)
        else:
            together.setdefault(usage.nodes, set()).add(signature)
    color = [
        number((_signature(costs), *sorted(mine)))
        for costs, mine in zip(problem.node_costs, held, strict=True)
    ]
    neighbours: list[list[tuple[int, int, int]]] = [[] for _ in color]
    for edge in problem.edges:
        kind = number(_signature(edge.costs))
        neighbours[edge.source].append((0, kind, edge.target))
        neighbours[edge.target].append((1, kind, edge.source))
    for (source, target), mine in together.items():
        kind = number(tuple(sorted(mine)))
        neighbours[source].append((0, kind, target))
        neighbours[target].append((1, kind, source))
    classes = len(set(color))
    for _ in range(radius):
        color = [
            number((color[v], *sorted((d, kind, color[u]) for d, kind, u in neighbours[v])))
            for v in range(len(color))
        ]
        before, classes = classes, len(set(color))
        if before == classes:
            break
    return _quotient(whole, color)


def unfold(choice: Sequence[int], node_class: Sequence[int]) -> list[int]:
    """The choice for the whole problem."""
    return [choice[c] for c in node_class]


def _signatures(problem: Problem) -> list[bytes]:
    """Of the bytes of each usage."""
    known = {id(usage.bytes): _signature(usage.bytes) for usage in problem.usages}
    return [known[id(usage.bytes)] for usage in problem.usages]


def _signature(costs: np.ndarray) -> bytes:
    """Equal for costs that are equal but for rounding."""
    return str(costs.shape).encode() + np.array(costs, dtype=np.float32).tobytes()


def _quotient(problem: Problem, color: list[int]) -> tuple[Problem, list[int]]:
    order = {c: i for i, c in enumerate(dict.fromkeys(color))}
    node_class = [order[c] for c in color]
    first = {c: node for node, c in reversed([*enumerate(node_class)])}
    terms = Terms([np.zeros(problem.node_costs[first[c]].size) for c in range(len(order))])
    for c, costs in zip(node_class, problem.node_costs, strict=True):
        terms.add((c,), costs)
    for edge in problem.edges:
        terms.add((node_class[edge.source], node_class[edge.target]), edge.costs)
    folded = Problem(
        node_costs=tuple(terms.nodes),
        edges=terms.edge_list(),
        usages=_tied(problem.usages, node_class),
        memory_limit=problem.memory_limit,
    )
    return folded, node_class


def _tied(usages: Sequence[Usage], node_class: Sequence[int]) -> tuple[Usage, ...]:
    """Usages of classes; two nodes of one class hold what equal strategies hold together."""
    diagonals: dict[int, np.ndarray] = {}
    tied: list[Usage] = []
    for usage in usages:
        nodes = tuple(node_class[node] for node in usage.nodes)
        if len(nodes) == 2 and nodes[0] == nodes[1]:
            key = id(usage.bytes)
            held = diagonals.setdefault(key, np.diagonal(usage.bytes))
            nodes = nodes[:1]
        else:
            held = usage.bytes
        tied.append(Usage(nodes=nodes, bytes=held, start=usage.start, stop=usage.stop))
    return tuple(tied)
