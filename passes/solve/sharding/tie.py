"""Ties nodes of a sharding problem: all nodes of a class take one strategy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from alpa.passes.solve.sharding.problem import Problem, Usage
from alpa.passes.solve.sharding.terms import Terms


def tie(problem: Problem, color: Sequence[int]) -> tuple[Problem, list[int]]:
    """The problem with one node per color, and that node of each of the nodes.

    Nodes of a color need as many strategies. An assignment of the tied problem costs what it costs
    in the whole problem.
    """
    order = {c: i for i, c in enumerate(dict.fromkeys(color))}
    node_class = [order[c] for c in color]
    terms = Terms()
    for c, costs in zip(node_class, problem.node_costs, strict=True):
        if c == len(terms.nodes):
            terms.add_node(costs)
        else:
            terms.add((c,), costs)
    for edge in problem.edges:
        terms.add((node_class[edge.source], node_class[edge.target]), edge.costs)
    folded = replace(
        problem,
        node_costs=tuple(terms.nodes),
        edges=terms.edge_list(),
        usages=_tied(problem.usages, node_class),
    )
    return folded, node_class


def facts(problem: Problem) -> Iterator[tuple[tuple[int, ...], Hashable]]:
    """What is known of single nodes and of pairs: seconds and bytes, by their signatures."""
    signatures: dict[int, bytes] = {}

    def of(array: np.ndarray) -> bytes:
        """Equal layers share most arrays."""
        key = id(array)
        if key not in signatures:
            signatures[key] = _signature(array)
        return signatures[key]

    for node, costs in enumerate(problem.node_costs):
        yield (node,), ("seconds", of(costs))
    for edge in problem.edges:
        yield (edge.source, edge.target), ("seconds", of(edge.costs))
    for usage in problem.usages:
        yield usage.nodes, ("bytes", of(usage.bytes))


def _signature(costs: np.ndarray) -> bytes:
    """A key that is the same for costs that differ by rounding only."""
    return str(costs.shape).encode() + np.array(costs, dtype=np.float32).tobytes()


def _tied(usages: Sequence[Usage], node_class: Sequence[int]) -> tuple[Usage, ...]:
    """The usages of folded nodes. Two nodes of one colour take equal strategies."""
    diagonals: dict[int, np.ndarray] = {}
    made: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], np.ndarray]] = {}
    tied: list[Usage] = []
    for usage in usages:
        key = usage.nodes, id(usage.bytes)  # Most usages are those of another time.
        if key not in made:
            nodes = tuple(dict.fromkeys([node_class[node] for node in usage.nodes]))
            held = usage.bytes
            if len(nodes) < held.ndim:
                held = diagonals.setdefault(id(held), np.diagonal(held))
            made[key] = nodes, held
        nodes, held = made[key]
        tied.append(Usage(nodes=nodes, bytes=held, start=usage.start, stop=usage.stop))
    return tuple(tied)
