"""The sharding problem of the paper (section 4.2): one strategy per op, costs on ops and edges.

Memory is what the paper leaves to the stages: usages of nodes over time, and one limit.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite
from typing import Literal

import numpy as np

from alpa.passes.solve.errors import VerificationError


class InfeasibleError(ValueError):
    """No choice has a finite cost; ``nodes`` holds nodes that cannot agree, others may too."""

    def __init__(self, nodes: tuple[int, ...]) -> None:
        names = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
        super().__init__(
            f"node {names} has no strategy of finite cost"
            if len(nodes) == 1
            else f"nodes {names} have no strategies that are allowed together"
        )
        self.nodes = nodes

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[object, ...]]:
        return type(self), (self.nodes,)


class OutOfMemoryError(InfeasibleError):
    """Every choice needs more memory than there is.

    ``needed`` is at least the bytes of the peak, ``time`` when they are needed; ``nodes`` hold
    most of them then, the largest first.
    """

    def __init__(self, needed: float, limit: float, time: int, nodes: tuple[int, ...]) -> None:
        super().__init__(nodes)
        self.args = (f"at least {needed:.6g} bytes are needed at time {time}, {limit:.6g} allowed",)
        self.needed, self.limit, self.time = needed, limit, time

    def __reduce__(self) -> tuple[type[InfeasibleError], tuple[object, ...]]:
        return type(self), (self.needed, self.limit, self.time, self.nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Usage:
    """What one or two nodes hold from time ``start`` until before ``stop``.

    ``bytes[i]`` under strategy i of ``nodes[0]``; ``bytes[i, j]`` where ``nodes[1]`` has strategy
    j: what exists for an edge's sake alone. Two nodes need an edge between them.
    """

    nodes: tuple[int, ...]
    bytes: np.ndarray
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Edge:
    """``costs[i, j]``: seconds when ``source`` has strategy i and ``target`` j; inf = forbidden."""

    source: int
    target: int
    costs: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Minimise eq. 1: the cost of each node's strategy plus that of each edge's pair.

    ``node_costs[v][i]`` is in seconds, +inf forbids. Parallel edges are allowed and add up. At no
    time may the usages, which add up too, come to more than ``memory_limit`` bytes.
    """

    node_costs: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...]
    usages: tuple[Usage, ...] = ()
    memory_limit: float = inf

    def digest(self) -> bytes:
        """Equal for equal problems; a hash of all numbers."""
        arrays = [*self.node_costs]
        places: list[tuple[int, ...]] = []
        for edge in self.edges:
            places.append((edge.source, edge.target))
            arrays.append(edge.costs)
        for usage in self.usages:
            places.append((*usage.nodes, usage.start, usage.stop))
            arrays.append(usage.bytes)
        # Many usages share an array, which is read once.
        known = {id(array): array for array in arrays}
        hashes = {key: _array_digest(array) for key, array in known.items()}
        found = hashlib.sha256(b"".join([hashes[id(array)] for array in arrays]))
        counts = len(self.node_costs), len(self.edges)
        found.update(repr((counts, places, self.memory_limit)).encode())
        return found.digest()

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem: shapes, numbers, NaN, -inf."""
        for node, costs in enumerate(self.node_costs):
            if costs.ndim != 1 or costs.size == 0:
                raise ValueError(
                    f"node {node} needs a vector of one cost per strategy, not shape {costs.shape}"
                )
            if np.isnan(costs).any() or (costs == -inf).any():
                raise ValueError(f"node {node} has a cost that is NaN or -inf: {costs}")
        for number, edge in enumerate(self.edges):
            title = f"edge {number} ({edge.source} -> {edge.target})"
            if not all(0 <= end < len(self.node_costs) for end in (edge.source, edge.target)):
                raise ValueError(f"{title} has an end that is none of {len(self.node_costs)} nodes")
            if edge.source == edge.target:
                raise ValueError(f"{title} is a loop; add its diagonal to the node's costs")
            shape = (self.node_costs[edge.source].size, self.node_costs[edge.target].size)
            if edge.costs.shape != shape:
                raise ValueError(
                    f"{title} has a matrix of shape {edge.costs.shape}, its ends have {shape} "
                    "strategies"
                )
            if not edge.costs.min(initial=inf) > -inf:
                raise ValueError(f"{title} has a cost that is NaN or -inf")

        pairs = self.edge_numbers() if any(len(u.nodes) == 2 for u in self.usages) else {}
        arrays = {id(usage.bytes): usage.bytes for usage in self.usages}
        bad = {key for key, held in arrays.items() if not (np.isfinite(held) & (held >= 0)).all()}
        for number, usage in enumerate(self.usages):
            title = f"usage {number} of {_name(usage.nodes)}"
            if not all(0 <= node < len(self.node_costs) for node in usage.nodes):
                raise ValueError(f"{title}: there are {len(self.node_costs)} nodes")
            shape = tuple(self.node_costs[node].size for node in usage.nodes)
            if usage.bytes.shape != shape:
                raise ValueError(
                    f"{title} has bytes of shape {usage.bytes.shape} for {shape} strategies"
                )
            if len(usage.nodes) != 1 and usage.nodes not in pairs:
                raise ValueError(f"{title}: no edge is between them")
            if usage.start >= usage.stop:
                raise ValueError(f"{title} ends at {usage.stop}, it starts at {usage.start}")
            if id(usage.bytes) in bad:
                raise ValueError(f"{title} has bytes that are negative or not finite")

    def cost(self, choice: Sequence[int]) -> float:
        """Eq. 1 for a choice of one strategy per node, in seconds."""
        total = sum(float(costs[i]) for costs, i in zip(self.node_costs, choice, strict=True))
        return total + sum(float(e.costs[choice[e.source], choice[e.target]]) for e in self.edges)

    def edge_numbers(self) -> dict[tuple[int, ...], int]:
        """By its ends, in either order, the last edge between two nodes."""
        numbers: dict[tuple[int, ...], int] = {}
        for number, edge in enumerate(self.edges):
            numbers[edge.source, edge.target] = numbers[edge.target, edge.source] = number
        return numbers

    @property
    def num_variables(self) -> int:
        """Variables of the linearised ILP: one per strategy and one per pair on an edge."""
        return sum(c.size for c in self.node_costs) + sum(e.costs.size for e in self.edges)


def _array_digest(array: np.ndarray) -> bytes:
    """A hash of an array's numbers, shape and type."""
    found = hashlib.sha256(repr((array.dtype.str, array.shape)).encode())
    found.update(np.ascontiguousarray(array).tobytes())
    return found.digest()


Row = dict[tuple[int, ...], np.ndarray]
"""What nodes, or pairs of them, hold at one time, per strategy."""


@dataclass(frozen=True, eq=False)
class Holding:
    """What a node holds over time, span by span, as far as there is a choice."""

    first: np.ndarray
    end: np.ndarray
    """spans, among the times of ``Memory``"""
    held: np.ndarray
    """``[span, strategy]``: bytes that it holds alone"""
    shared: tuple[tuple[int, int, np.ndarray, int], ...]
    """spans with bytes ``[strategy, strategy of another node]``, and that node"""


class Memory:
    """The usages of a problem by time; times are numbered by where some usage starts."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts = np.array([usage.start for usage in problem.usages], dtype=np.int64)
        self._stops = np.array([usage.stop for usage in problem.usages], dtype=np.int64)
        self.times = np.unique(self._starts)
        """All peaks begin where something starts."""
        self.first = np.searchsorted(self.times, self._starts)
        self.end = np.searchsorted(self.times, self._stops)
        # All bytes in one vector, equal arrays once: a choice reads it in one go.
        arrays = {id(usage.bytes): usage.bytes for usage in problem.usages}
        begins = np.cumsum([0, *(array.size for array in arrays.values())])
        begin = dict(zip(arrays, begins.tolist(), strict=False))
        self._flat = np.concatenate([np.zeros(0), *(a.ravel() for a in arrays.values())])
        self._begin = np.array([begin[id(u.bytes)] for u in problem.usages], dtype=np.int64)
        ends = [(u.nodes[0], u.nodes[-1]) for u in problem.usages]
        self._ends = np.array(ends, dtype=np.int64).reshape(-1, 2)
        strides = [(u.bytes.shape[1], 1) if u.bytes.ndim == 2 else (1, 0) for u in problem.usages]
        self._strides = np.array(strides, dtype=np.int64).reshape(-1, 2)

    def over_time(self, choice: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes in use at each of ``times``."""
        every = np.arange(len(self.first))
        return self.summed(every, self.held(every, np.asarray(choice, dtype=np.int64)))

    def held(self, usages: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """Bytes of each of these usages, by number."""
        chosen = choice[self._ends[usages]]
        return self._flat[self._begin[usages] + (chosen * self._strides[usages]).sum(axis=1)]

    def summed(self, usages: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Bytes at each of ``times`` when these usages hold so many."""
        change = np.zeros(len(self.times) + 1)
        np.add.at(change, self.first[usages], held)
        np.subtract.at(change, self.end[usages], held)
        return np.cumsum(change)[:-1]

    @cached_property
    def usages_of(self) -> tuple[np.ndarray, np.ndarray]:
        """The usages of all nodes, sorted by node, and where those of each node begin."""
        count = len(self._problem.node_costs)
        single = self._ends[:, 0] == self._ends[:, 1]
        nodes = np.concatenate([self._ends[:, 0], self._ends[~single, 1]])
        usages = np.concatenate([np.arange(len(self._ends)), np.flatnonzero(~single)])
        begins = np.append(0, np.cumsum(np.bincount(nodes, minlength=count)))
        return usages[np.argsort(nodes, kind="stable")], begins

    @cached_property
    def holdings(self) -> list[Holding]:
        """Of each node; what two nodes hold together is with both."""
        varies = {id(usage.bytes): bool(np.ptp(usage.bytes) > 0) for usage in self._problem.usages}
        merged: dict[tuple[tuple[int, ...], int, int], np.ndarray] = {}
        for usage, first, end in zip(self._problem.usages, self.first, self.end, strict=True):
            if varies[id(usage.bytes)]:
                key = (usage.nodes, int(first), int(end))
                merged[key] = merged[key] + usage.bytes if key in merged else usage.bytes
        alone: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in self._problem.node_costs]
        shared: list[list[tuple[int, int, np.ndarray, int]]] = [[] for _ in alone]
        for (nodes, first, end), held in merged.items():
            if len(nodes) == 1:
                alone[nodes[0]].append((first, end, held))
            else:
                shared[nodes[0]].append((first, end, held, nodes[1]))
                shared[nodes[1]].append((first, end, held.T, nodes[0]))
        return [
            Holding(
                first=np.array([first for first, _, _ in mine], dtype=np.int64),
                end=np.array([end for _, end, _ in mine], dtype=np.int64),
                held=np.array([held for _, _, held in mine]).reshape(len(mine), costs.size),
                shared=tuple(ours),
            )
            for mine, ours, costs in zip(alone, shared, self._problem.node_costs, strict=True)
        ]

    def peak(self, choice: Sequence[int]) -> tuple[float, int]:
        """The most bytes in use, and the time when."""
        if not len(self.times):
            return 0.0, 0
        used = self.over_time(choice)
        most = int(np.argmax(used))
        return float(used[most]), int(self.times[most])

    def row(self, time: int) -> Row:
        """What is held at a time."""
        row: Row = {}
        for number in np.flatnonzero((self._starts <= time) & (time < self._stops)):
            usage = self._problem.usages[number]
            row[usage.nodes] = row.get(usage.nodes, 0.0) + usage.bytes
        return row


def with_edges_of_usages(problem: Problem) -> Problem:
    """The problem with an edge between any two nodes that hold something together."""
    known = problem.edge_numbers()
    missing = {
        tuple(sorted(usage.nodes)): Edge(
            usage.nodes[0], usage.nodes[1], np.zeros(usage.bytes.shape)
        )
        for usage in problem.usages
        if len(usage.nodes) == 2 and usage.nodes not in known
    }
    return replace(problem, edges=(*problem.edges, *missing.values()))


def with_strategies(usages: Iterable[Usage], kept: Sequence[np.ndarray]) -> tuple[Usage, ...]:
    """Usages of the strategies that each node keeps; arrays that were one and keep the same stay
    one."""
    made: dict[Hashable, np.ndarray] = {}
    fewer: list[Usage] = []
    for usage in usages:
        key = (usage.nodes, id(usage.bytes))
        held = made.get(key)
        if held is None:
            mine = [kept[node] for node in usage.nodes]
            like = (id(usage.bytes), *[strategies.tobytes() for strategies in mine])
            if like not in made:
                first, *others = mine
                made[like] = usage.bytes[first[:, None], *others] if others else usage.bytes[first]
            held = made[key] = made[like]
        fewer.append(Usage(nodes=usage.nodes, bytes=held, start=usage.start, stop=usage.stop))
    return tuple(fewer)


def _name(nodes: Sequence[int]) -> str:
    return ("node " if len(nodes) == 1 else "nodes ") + " and ".join(map(str, nodes))


Status = Literal["optimal", "within_gap", "time_limit"]
"""``optimal``: the objective equals the bound to ``OPTIMAL`` of it. ``within_gap``: the gap is one
with which the search was content. ``time_limit``: the search ended before either was proven."""

OPTIMAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A choice with its cost and what is proven about it."""

    choice: tuple[int, ...]
    objective: float
    """seconds, the cost of ``choice``"""
    bound: float
    """seconds; no choice of this problem costs less"""
    is_free: bool = False
    """no choice that exceeds the memory costs less than the bound either"""
    wanted_gap: float = 0.0
    """with which the search was content"""
    peak_bytes: float = 0.0
    """the most that ``choice`` uses at any time"""
    seconds: float
    """of the search"""
    variables: int
    """of the ILP as posed"""

    @property
    def status(self) -> Status:
        """What is proven (see ``Status``)."""
        if self.gap <= OPTIMAL:
            return "optimal"
        return "within_gap" if self.gap <= self.wanted_gap else "time_limit"

    @property
    def gap(self) -> float:
        """``(objective - bound) / |objective|``; 0 where they are equal."""
        if self.objective == self.bound:
            return 0.0
        return (self.objective - self.bound) / max(abs(self.objective), 1e-300)


Solver = Callable[[Problem], Solution]
"""Solves a sharding problem. Raises ``InfeasibleError``, its ``OutOfMemoryError``, or
``TimeoutError`` where no choice was found."""


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes the cost, and checks each constraint. Raises ``VerificationError``."""
    sizes = [costs.size for costs in problem.node_costs]
    if len(solution.choice) != len(sizes):
        raise VerificationError(f"{len(solution.choice)} choices for {len(sizes)} nodes")
    for node, (strategy, size) in enumerate(zip(solution.choice, sizes, strict=True)):
        if not 0 <= strategy < size:
            raise VerificationError(
                f"node {node} has {size} strategies, the solution takes {strategy}"
            )
    if sizes and np.asarray(solution.choice).dtype.kind not in "iu":
        raise VerificationError(f"strategies are whole numbers: {reprlib.repr(solution.choice)}")
    cost = problem.cost(solution.choice)
    if not cost < inf:
        raise VerificationError("the solution takes a forbidden strategy or pair of strategies")
    peak, moment = Memory(problem).peak(solution.choice)
    if peak > problem.memory_limit:
        raise VerificationError(
            f"the solution uses {peak} bytes at time {moment}, {problem.memory_limit} allowed"
        )
    most = 1e-9 * max(abs(cost), abs(solution.objective))
    if not isfinite(solution.objective) or abs(cost - solution.objective) > most:
        raise VerificationError(f"the solution costs {cost} s, not {solution.objective} s")
    if not isfinite(solution.bound):
        raise VerificationError(f"bound {solution.bound} s is not finite; 0 s always is a bound")
    if solution.bound > solution.objective:
        raise VerificationError(
            f"bound {solution.bound} s is above objective {solution.objective} s"
        )
