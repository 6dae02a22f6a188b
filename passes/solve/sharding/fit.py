"""Strategies that no choice within memory can take, because they alone are too large.

The others hold at least the sum of their least strategies; what a strategy holds above its node's
least must fit into the rest of the limit, at every time. What is forbidden raises other nodes'
least, so this goes on until nothing changes (bound propagation on the rows of a knapsack).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from alpa.passes.solve.sharding.problem import InfeasibleError, Memory, OutOfMemoryError, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


@dataclass(frozen=True, eq=False)
class Spans:
    """What a node holds, piece by piece of the time when it holds something that is to choose."""

    cuts: np.ndarray
    """where pieces begin, among the times of ``Memory``, and where the last one ends"""
    held: np.ndarray
    """``[piece, strategy]``"""


def spans(problem: Problem, memory: Memory) -> dict[int, Spans]:
    """Of each node with usages."""
    mine: dict[int, list[int]] = {}
    least: dict[int, np.ndarray] = {}
    for number, usage in enumerate(problem.usages):
        mine.setdefault(usage.nodes[0], []).append(number)
        if id(usage.bytes) not in least:
            # Of two nodes the first holds what its best partner leaves it.
            held = usage.bytes.astype(float)
            least[id(usage.bytes)] = held if held.ndim == 1 else held.min(axis=1)
    result: dict[int, Spans] = {}
    for node, numbers in mine.items():
        first, end = memory.first[numbers], memory.end[numbers]
        cuts = np.unique(np.concatenate([first, end]))
        change = np.zeros((cuts.size, problem.node_costs[node].size))
        held = np.stack([least[id(problem.usages[number].bytes)] for number in numbers])
        np.add.at(change, np.searchsorted(cuts, first), held)
        np.subtract.at(change, np.searchsorted(cuts, end), held)
        result[node] = Spans(cuts, np.cumsum(change, axis=0)[:-1])
    return result


def without_oversized(problem: Problem, *, settings: Settings = DEFAULT) -> Problem:
    """The problem without the strategies that cannot fit.

    Raises ``OutOfMemoryError`` where even the least of every node is too much.
    """
    if Step.OVERSIZED not in settings.steps:
        return problem
    memory = Memory(problem)
    over_time = spans(problem, memory)
    costs = list(problem.node_costs)
    least = {v: _least(s, costs[v]) for v, s in over_time.items()}
    change = np.zeros(len(memory.times) + 1)
    for node, span in over_time.items():
        change[span.cuts] += np.diff(np.concatenate([[0.0], least[node], [0.0]]))
    room = problem.memory_limit - np.cumsum(change)[:-1]
    rounding = settings.tuning.bytes_rounding * problem.memory_limit
    waiting = set(over_time)
    while True:
        _check(problem, memory, room, rounding)
        again: set[int] = set()
        # The last cut may lie behind the last time.
        until_end = np.append(room, inf)
        for node in sorted(waiting):
            span = over_time[node]
            tight = np.minimum.reduceat(until_end, span.cuts)[:-1]
            above = span.held - least[node][:, None]
            fits = (above <= tight[:, None] + rounding).all(axis=0)
            if (np.isfinite(costs[node]) & ~fits).any():
                costs[node] = np.where(fits, costs[node], inf)
                again.add(node)
        if not again:
            return replace(problem, node_costs=tuple(costs))
        raised = False
        for node in again:
            span = over_time[node]
            if not np.isfinite(costs[node]).any():
                raise InfeasibleError((node,))
            new = _least(span, costs[node])
            for piece in np.flatnonzero(new > least[node]):
                room[span.cuts[piece] : span.cuts[piece + 1]] -= new[piece] - least[node][piece]
                raised = True
            least[node] = new
        if not raised:
            return replace(problem, node_costs=tuple(costs))
        waiting = set(over_time)


def _least(span: Spans, costs: np.ndarray) -> np.ndarray:
    allowed = np.isfinite(costs)
    if not allowed.any():
        allowed = np.ones(costs.size, dtype=bool)
    return span.held[:, allowed].min(axis=1)


def _check(problem: Problem, memory: Memory, room: np.ndarray, rounding: float) -> None:
    if room.min(initial=inf) < -rounding:
        worst = int(np.argmin(room))
        needed = problem.memory_limit - float(room[worst])
        raise OutOfMemoryError(needed, problem.memory_limit, int(memory.times[worst]), ())
