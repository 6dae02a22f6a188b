"""Choices within memory: a greedy repair of one that breaks the limit, and local improvement.

The repair changes one node at a time: that which saves bytes at the times over the limit for the
least extra cost per byte of the excess, as in Toyoda's greedy method for multidimensional knapsacks
(1975). Costs count the edges to the neighbours as they stand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import ceil, inf, log2

import numpy as np

from alpa.passes.solve.sharding.bound import neighbours
from alpa.passes.solve.sharding.problem import Memory, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


class Walk:
    """A choice that changes node by node, with what each change would cost and hold."""

    def __init__(self, problem: Problem, memory: Memory, choice: tuple[int, ...]) -> None:
        self.problem, self.choice = problem, list(choice)
        self.used = memory.over_time(choice)
        self.around = neighbours(problem)
        self._holdings = memory.holdings

    def costs(self, node: int) -> np.ndarray:
        """Of each of the node's strategies, with its edges, as the neighbours stand."""
        costs = self.problem.node_costs[node]
        for number, axis, other in self.around[node]:
            costs = costs + self.problem.edges[number].costs.take(self.choice[other], axis=1 - axis)
        return costs

    def weighted(self, node: int, before: np.ndarray) -> np.ndarray:
        """Bytes of each strategy, summed over time; ``before[t]``: the weight of times before t."""
        mine = self._holdings[node]
        total = (before[mine.end] - before[mine.first]) @ mine.held
        for first, end, held, other in mine.shared:
            total = total + (before[end] - before[first]) * held[:, self.choice[other]]
        return total

    def fits(self, node: int, strategy: int) -> bool:
        """Whether the node may take a strategy within the limit."""
        return bool(self.after(node, strategy).max(initial=0.0) <= self.problem.memory_limit)

    def take(self, node: int, strategy: int) -> None:
        """Changes a node's strategy."""
        self.used = self.after(node, strategy)
        self.choice[node] = strategy

    def after(self, node: int, strategy: int) -> np.ndarray:
        """Bytes in use over time when a node has taken a strategy."""
        after, now, mine = self.used.copy(), self.choice[node], self._holdings[node]
        more = mine.held[:, strategy] - mine.held[:, now]
        for k in np.flatnonzero(more):
            after[mine.first[k] : mine.end[k]] += more[k]
        for first, end, held, other in mine.shared:
            after[first:end] += held[strategy, self.choice[other]] - held[now, self.choice[other]]
        return after


def repair(
    problem: Problem,
    memory: Memory,
    choice: tuple[int, ...],
    *,
    deadline: float,
    settings: Settings = DEFAULT,
) -> tuple[int, ...] | None:
    """A choice within memory near a given one; None where the greedy way ends before any."""
    if Step.REPAIR not in settings.steps:
        return None
    walk = Walk(problem, memory, choice)
    heap: list[_Offer] = []
    for _ in range(settings.tuning.repair_changes * len(choice)):
        if not (walk.used > problem.memory_limit).any():
            return tuple(walk.choice)
        if time.monotonic() > deadline:
            return None
        afresh = not heap
        if not _take_best(walk, heap, settings.tuning.repair_near) and afresh:
            return None
    return None


_Offer = tuple[float, int, int]
"""Extra cost per byte saved, node, and its strategy that would save it."""


def _take_best(walk: Walk, heap: list[_Offer], near: float) -> bool:
    """Takes the best offer that lowers the excess; an empty heap is filled first.

    An offer ``near`` the best known is taken, for all grow a little worse with each change.
    """
    limit = walk.problem.memory_limit
    over = walk.used > limit
    before = np.concatenate([[0.0], np.cumsum(over)])
    total = float((walk.used - limit)[over].sum())
    # A power of two: each change of it makes all offers stale.
    excess = 2.0 ** ceil(log2(total))
    if not heap:
        heap += _offers(walk, range(len(walk.choice)), before, excess)
        heapify(heap)
    # Offers grow worse with time, as a rule: only the best are kept up to date.
    while heap:
        _, node, _ = heappop(heap)
        for fresh in _offers(walk, (node,), before, excess):
            if heap and fresh[0] > heap[0][0] + near * abs(heap[0][0]):
                heappush(heap, fresh)
                continue
            used = walk.after(node, fresh[2])
            # What saves at times over the limit may hold more at others.
            if float(np.maximum(used - limit, 0.0).sum()) < total:
                walk.take(node, fresh[2])
                touched = (node, *(other for _, _, other in walk.around[node]))
                for offer in _offers(walk, touched, before, excess):
                    heappush(heap, offer)
                return True
    return False


def _offers(walk: Walk, nodes: Iterable[int], before: np.ndarray, excess: float) -> list[_Offer]:
    """The best of each of these nodes where something can be saved."""
    found = ((_offer(walk, node, before, excess), node) for node in nodes)
    return [(offer[0], node, offer[1]) for offer, node in found if offer is not None]


def _offer(walk: Walk, node: int, before: np.ndarray, excess: float) -> tuple[float, int] | None:
    """The node's strategy with the least extra cost per byte that it saves of the excess."""
    held = walk.weighted(node, before)
    saved = held[walk.choice[node]] - held
    if not (saved > 0).any():
        return None
    costs = walk.costs(node)
    now = costs[walk.choice[node]]
    # From a forbidden pair any allowed one is a step forward.
    extra = costs - (now if now < inf else 0.0)
    rate = np.full(saved.size, inf)
    saves = saved > 0
    rate[saves] = extra[saves] / np.minimum(saved[saves], excess)
    best = int(np.argmin(rate))
    return (float(rate[best]), best) if rate[best] < inf else None


def improve_within(
    problem: Problem,
    memory: Memory,
    choice: tuple[int, ...],
    *,
    deadline: float = inf,
    settings: Settings = DEFAULT,
) -> tuple[int, ...]:
    """Changes one node at a time while that lowers the cost and fits into memory."""
    if Step.DESCENT_WITHIN not in settings.steps:
        return choice
    walk = Walk(problem, memory, choice)
    waiting = set(range(len(choice)))
    for _ in range(settings.tuning.descent_within_rounds):
        changed: set[int] = set()
        for node in sorted(waiting):
            costs, now = walk.costs(node), walk.choice[node]
            cheaper = np.flatnonzero(costs < costs[now])
            for strategy in cheaper[np.argsort(costs[cheaper], kind="stable")]:
                if walk.fits(node, int(strategy)):
                    walk.take(node, int(strategy))
                    changed.update((node, *(other for _, _, other in walk.around[node])))
                    break
        if not changed or time.monotonic() > deadline:
            break
        waiting = set(range(len(choice)))
    return tuple(walk.choice)
