"""Exact minimisation of a sharding problem of small treewidth: bucket elimination.

Nodes are minimised out one by one, the one with the smallest table first. The table of a node
runs over its own and all its neighbours' strategies, so time and memory are the sum and the largest
of ``prod S`` over the cliques of the order: small for long chains of blocks, hopeless for dense
graphs. The order is found first, by sizes alone; the caller's limit is checked before any table.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from alpa.passes.solve.sharding.problem import Problem

Factor = tuple[tuple[int, ...], np.ndarray]
"""(nodes in ascending order, costs with one dimension per node)"""


def eliminate(problem: Problem, *, max_entries: float) -> tuple[int, ...] | None:
    """An optimal choice; None where all tables together would have over ``max_entries`` entries.

    Every entry costs about 10 ns and, in the largest table, 8 bytes.
    """
    order = _order(problem, max_entries)
    if order is None:
        return None
    buckets: list[list[Factor]] = [[((v,), c)] for v, c in enumerate(problem.node_costs)]
    for edge in problem.edges:
        ends, costs = (edge.source, edge.target), edge.costs
        factor = (ends, costs) if ends[0] < ends[1] else (ends[::-1], costs.T)
        for end in ends:
            buckets[end].append(factor)
    answers: list[tuple[int, tuple[int, ...], np.ndarray]] = []
    for node in order:
        scope, table = _joined(buckets[node])
        axis = scope.index(node)
        rest = scope[:axis] + scope[axis + 1 :]
        answers.append((node, rest, table.argmin(axis=axis)))
        message: Factor = (rest, table.min(axis=axis))
        for other in rest:
            buckets[other] = [f for f in buckets[other] if node not in f[0]] + [message]
        buckets[node] = []
    choice = [0] * len(problem.node_costs)
    for node, rest, best in reversed(answers):
        choice[node] = int(best[tuple(choice[other] for other in rest)])
    return tuple(choice)


def _joined(factors: Iterable[Factor]) -> Factor:
    """The sum of factors, over the union of their nodes."""
    parts = list(factors)
    scope = tuple(sorted({node for nodes, _ in parts for node in nodes}))
    # Small factors first: the sum grows to full size only with the last ones.
    parts.sort(key=lambda part: part[1].size)
    total = np.zeros((1,) * len(scope))
    for nodes, costs in parts:
        shape = [1] * len(scope)
        for node, size in zip(nodes, costs.shape, strict=True):
            shape[scope.index(node)] = size
        total = total + costs.reshape(shape)
    return scope, total


def _order(problem: Problem, max_entries: float) -> list[int] | None:
    """The greedy order by table size; None where its tables exceed the limit."""
    size = [float(costs.size) for costs in problem.node_costs]
    near: list[set[int]] = [set() for _ in size]
    for edge in problem.edges:
        near[edge.source].add(edge.target)
        near[edge.target].add(edge.source)

    def entries(node: int) -> float:
        product = size[node]
        for other in near[node]:
            product *= size[other]
        return product

    tables = {node: entries(node) for node in range(len(size))}
    order: list[int] = []
    left = max_entries
    while tables:
        node = min(tables, key=tables.__getitem__)
        left -= tables.pop(node)
        # 64 is numpy's limit of dimensions.
        if left < 0 or len(near[node]) > 60:
            return None
        order.append(node)
        for other in near[node]:
            near[other] |= near[node]
            near[other] -= {node, other}
        for other in near[node]:
            tables[other] = entries(other)
    return order
