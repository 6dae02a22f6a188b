"""Instances of the contest with a known optimum, of any size.

An assignment is planted, with prices of a byte at a part of all times. Each strategy, and each pair
of strategies on an edge, has an *excess*: zero where planted, and at least zero elsewhere. Costs
are excesses less the price of the bytes, moved between nodes and edges at random, and made positive
by constants. The planted assignment fills the limit at each time with a price. For any assignment
within the limit,

    cost = constants + excesses - prices . bytes >= constants - prices . limit,

with equality for the planted one: it is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Planted:
    """An instance in the contest's format, and what is known about it."""

    document: dict[str, Any]
    choice: tuple[int, ...]
    optimum: int
    cheapest: int
    """the cost when each node takes its cheapest strategy, whatever that holds"""
    binding: int
    """the number of times when the optimum fills the limit"""


def plant(nodes: int, seed: int) -> Planted:
    """An instance with ``nodes`` nodes, of two to nine strategies each, and as many times."""
    random = np.random.default_rng(seed)
    sizes: list[int] = random.integers(2, 10, size=nodes).tolist()
    starts = np.arange(nodes)
    lives = np.where(
        random.random(nodes) < 0.05,
        random.integers(9, 201, size=nodes),
        random.integers(2, 9, size=nodes),
    )
    stops = np.minimum(starts + lives, nodes)
    held = [random.integers(1, 1001, size=size) for size in sizes]
    planted: list[int] = [int(random.integers(size)) for size in sizes]
    choice = np.array(planted)
    used = _over_time(nodes, starts, stops, [h[i] for h, i in zip(held, planted, strict=True)])
    limit = int(used.max()) + 1
    binding = np.sort(random.choice(nodes, size=max(nodes // 20, 1), replace=False))
    prices = np.zeros(nodes, dtype=np.int64)
    prices[binding] = random.integers(1, 4, size=binding.size)

    edges = _edges(nodes, random)
    before = np.append(0, np.cumsum(prices))
    weights = before[stops] - before[starts]
    costs = [_excess((size,), (i,), random) for size, i in zip(sizes, planted, strict=True)]
    for node, held_here in enumerate(held):
        costs[node] = costs[node] - weights[node] * held_here
    matrices = [
        _excess((sizes[u], sizes[v]), (planted[u], planted[v]), random, zeros=0.2)
        for u, v in edges.tolist()
    ]
    for (u, v), matrix in zip(edges, matrices, strict=True):
        for end, axis in ((u, 0), (v, 1)):
            moved = random.integers(0, 4001, size=sizes[end])
            matrix += moved[:, None] if axis == 0 else moved
            costs[end] = costs[end] - moved
    costs = [c - c.min() for c in costs]

    # Fillers have no choice: they fill the limit at the times with a price.
    fill = limit - used[binding]
    document = {
        "problem": {
            "name": f"planted, {nodes} nodes, seed {seed}",
            "nodes": {
                "intervals": [
                    *([a, b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)),
                    *([t, t + 1] for t in binding.tolist()),
                ],
                "costs": [*(c.tolist() for c in costs), *([0] for _ in binding)],
                "usages": [*(h.tolist() for h in held), *([f] for f in fill.tolist())],
            },
            "edges": {
                "nodes": edges.tolist(),
                "costs": [matrix.ravel().tolist() for matrix in matrices],
            },
            "usage_limit": limit,
        }
    }

    def cost(chosen: np.ndarray) -> int:
        total = sum(int(c[i]) for c, i in zip(costs, chosen, strict=True))
        pairs = zip(edges, matrices, strict=True)
        return total + sum(int(matrix[chosen[u], chosen[v]]) for (u, v), matrix in pairs)

    return Planted(
        document=document,
        choice=(*planted, *([0] * binding.size)),
        optimum=cost(choice),
        cheapest=cost(np.array([int(c.argmin()) for c in costs])),
        binding=binding.size,
    )


def _over_time(
    count: int, starts: np.ndarray, stops: np.ndarray, held: list[np.ndarray]
) -> np.ndarray:
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, starts, held)
    np.subtract.at(change, stops, held)
    return np.cumsum(change)[:-1]


def _edges(nodes: int, random: np.random.Generator) -> np.ndarray:
    """Three nodes of four are leaves of one of the others nearby; those make a band, as layers do,
    with some long ways back."""
    hubs = np.flatnonzero(np.arange(nodes) % 4 == 0)
    pairs: set[tuple[int, int]] = set()
    for node in range(1, nodes):
        if node % 4:
            pairs.add((4 * max(node // 4 - int(random.integers(3)), 0), node))
            continue
        place = node // 4
        for back in (1, int(random.integers(2, 9)), int(random.integers(1, place + 1))):
            if back <= place:
                pairs.add((int(hubs[place - back]), node))
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)


def _excess(
    shape: tuple[int, ...], planted: tuple[int, ...], random: np.random.Generator, zeros: float = 0
) -> np.ndarray:
    """Zero where planted, and elsewhere as often as ``zeros`` says."""
    excess = np.ceil(random.exponential(2000.0, size=shape)).astype(np.int64)
    excess[random.random(shape) < zeros] = 0
    excess[planted] = 0
    return excess
