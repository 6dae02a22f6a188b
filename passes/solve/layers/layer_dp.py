"""Clusters a sequence of ops into layers: the paper's operator clustering (section 5.2, eq. 6).

``G(k, r)`` is the least possible largest input of a layer when ops 0..k form r layers:

    G(k, r) = min over i <= k of max(G(i - 1, r - 1), C(i, k))
              subject to  FLOP(i..k) <= (1 + delta) FLOP_total / L

Among the clusterings of least largest input, the one of least variance of FLOPs per layer is taken,
found by a second pass of the same recursion over sums of squares. Both are exact; time is
O(K^2 L), less where the FLOP bound keeps layers short.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite

import numpy as np
import numpy.typing as npt

from alpa.passes.solve.errors import VerificationError

_ROUNDING = 1e-12
"""FLOPs of layers are differences of prefix sums: equal up to this part."""


class Received:
    """What layers receive: for each k, the bytes that ops i..k receive from ops before i <= k.

    The matrix of all i and k would be by far the largest thing here, so it is never held: each
    column is made from the one before. What is held are *hops* (first, last, size): a layer that
    begins with one of the ops first..last and reaches `last` receives `size` bytes more.
    """

    def __init__(
        self, num_ops: int, values: Sequence[tuple[int, float, Sequence[int]]] = ()
    ) -> None:
        """From (producer, bytes, consumers in ascending order) of each value.

        A value counts once for a layer, however many of its ops read it. Ops are numbered from 0;
        inputs of the program are no values here. Bytes are whole numbers, so sums are exact.
        """
        hops = [
            (before + 1, consumer, size)
            for producer, size, consumers in values
            for before, consumer in pairwise((producer, *consumers))
        ]
        first, last, size = zip(*hops, strict=True) if hops else ((), (), ())
        self.num_ops = num_ops
        self._hops = np.array(first, int), np.array(last, int), np.array(size, float)

    def _each(self) -> Iterator[tuple[int, int, float]]:
        first, last, size = self._hops
        return zip(first.tolist(), last.tolist(), size.tolist(), strict=True)

    @property
    def is_finite(self) -> bool:
        """Whether all sizes are."""
        return isfinite(self._hops[2].sum())

    @property
    def crossing(self) -> np.ndarray:
        """The bytes that each op and all ops behind it receive from ops before it, [K]."""
        first, last, size = self._hops
        begin = np.bincount(first, size, minlength=self.num_ops)
        end = np.bincount(last + 1, size, minlength=self.num_ops)
        return (begin - end[: self.num_ops]).cumsum()

    def by_layer(self, begin: int, end: int) -> float:
        """The bytes that the ops from `begin` up to `end`, without `end`, receive."""
        first, last, size = self._hops
        return float(size[(first <= begin) & (begin <= last) & (last < end)].sum())

    def begins(self, most: float) -> np.ndarray:
        """The ops with which a layer can begin, where each layer receives at most `most` bytes.

        A layer ends before such an op, too, or with the last op. So it receives no less than the
        ops up to the next one of these, which are found from the last one on.
        """
        ends: list[list[float]] = [[] for _ in range(self.num_ops)]
        begins: list[list[tuple[int, float]]] = [[] for _ in range(self.num_ops + 1)]
        for first, last, size in self._each():
            ends[last].append(size)
            begins[first].append((last, size))
        found: list[int] = []
        end, received = self.num_ops, 0.0
        for op in reversed(range(self.num_ops)):
            received += sum(ends[op])
            received -= sum(size for last, size in begins[op + 1] if last < end)
            if received <= most:
                found.append(op)
                end, received = op, 0.0
        return np.array(found[::-1])

    def joined(self, starts: np.ndarray) -> Received:
        """What layers of blocks receive; a block is the ops from each of `starts` to the next."""
        found = Received(starts.size)
        first, last, size = self._hops
        first, last = starts.searchsorted(first), starts.searchsorted(last, side="right") - 1
        inside = first <= last
        found._hops = first[inside], last[inside], size[inside]
        return found

    def columns(self) -> Iterator[np.ndarray]:
        """For each k the bytes by i, [k + 1], until the next one is asked for."""
        hops: list[list[tuple[int, float]]] = [[] for _ in range(self.num_ops)]
        for first, last, size in self._each():
            hops[last].append((first, size))
        column = np.zeros(self.num_ops)
        for k, of_op in enumerate(hops):
            for first, size in of_op:
                column[first : k + 1] += size
            yield column[: k + 1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """K ops in program order, to be cut into ``num_layers`` non-empty layers."""

    flops: np.ndarray
    """FLOPs of each op, [K]"""
    received: Received
    """by these ops"""
    num_layers: int
    delta: float
    """how far a layer's FLOPs may lie above the average; 0.5 = by half"""

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        count = self.flops.size
        if self.flops.ndim != 1 or count == 0:
            raise ValueError(
                f"flops must be a vector with one entry per op, not {self.flops.shape}"
            )
        if self.received.num_ops != count:
            raise ValueError(f"received must be of {count} ops, not {self.received.num_ops}")
        if not 1 <= self.num_layers <= count:
            raise ValueError(
                f"{count} ops cannot form {self.num_layers} layers: ask for 1 to {count}"
            )
        if not (np.isfinite(self.flops).all() and (self.flops >= 0).all()):
            raise ValueError("flops must be finite and not negative")
        if not self.received.is_finite or self.delta < 0:
            raise ValueError("received must be finite and delta not negative")


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Layers by their first ops."""

    starts: tuple[int, ...]
    largest_input: float
    """bytes that the layer with the largest input receives from earlier layers"""
    flop_bound: float
    """FLOPs that a layer may have: (1 + delta) of the average, or, where no clustering keeps
    that, the smallest bound that one keeps"""


def solve(problem: Problem) -> Solution:
    """The clustering of eq. 6, of least variance among the best. Raises ``ValueError``."""
    problem.check()
    sums = np.concatenate([[0.0], np.cumsum(problem.flops)])
    total = float(sums[-1])
    average = total / problem.num_layers
    low = max((1 + problem.delta) * average, float(problem.flops.max()))
    bound = _least_bound(sums, low, problem.num_layers)
    # A layer that ends with op k may begin at lows[k]..k.
    limit = bound + _ROUNDING * total
    lows = np.searchsorted(sums, sums[1:] - limit, side="left")
    lows = np.minimum(lows, np.arange(sums.size - 1))
    enough = _enough(problem, lows)
    # Only where layers may begin are they cut: ops are joined to blocks.
    begins = problem.received.begins(enough)
    received = problem.received.joined(begins)
    ends = np.append(begins[1:], sums.size - 1)
    lows, sums = begins.searchsorted(lows[ends - 1]), sums[np.append(begins, ends[-1])]

    def inputs(begins: np.ndarray, _: int, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        useful = received <= enough
        return begins[useful], received[useful]

    largest = float(_recursion(problem.num_layers, received, lows, inputs, np.maximum)[0][-1, -1])

    def squares(begins: np.ndarray, k: int, received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        begins = begins[received <= largest]
        return begins, ((sums[k + 1] - sums[begins]) / max(average, 1.0)) ** 2

    _, choices = _recursion(problem.num_layers, received, lows, squares, np.add)
    starts: list[int] = []
    end = begins.size
    for r in range(problem.num_layers, 0, -1):
        end = int(choices[r, end])
        starts.append(int(begins[end]))
    starts.reverse()
    solution = Solution(
        starts=tuple(starts),
        largest_input=largest,
        flop_bound=bound,
    )
    verify(problem, solution)
    return solution


def solve_narrow(problem: Problem, fewest: int) -> Solution:
    """The clustering of eq. 6, or one of fewer layers if these receive at most half as many bytes.

    Of the numbers from `fewest` on whose largest input is the least, the one whose layers have the
    most equal FLOPs is taken: the least sum of squares over the number of layers. If `fewest`
    layers gain nothing, no other number is tried.

    Raises:
        ValueError: this is no problem.
    """
    usual = solve(problem)
    if fewest >= problem.num_layers:
        return usual
    least = solve(replace(problem, num_layers=fewest))
    if least.largest_input > usual.largest_input / 2:
        return usual
    between = range(fewest + 1, problem.num_layers)
    every = [least, *(solve(replace(problem, num_layers=count)) for count in between)]
    narrowest = min(one.largest_input for one in every)

    def inequality(one: Solution) -> float:
        flops = np.add.reduceat(problem.flops, one.starts)
        return float(len(flops) * (flops**2).sum())

    return min((o for o in every if o.largest_input == narrowest), key=inequality)


def _enough(problem: Problem, lows: np.ndarray) -> float:
    """Bytes of a largest input that some clustering keeps: so few layers are left to try.

    No layer receives more than all bytes that cross its begin. Layers begin where at most so many
    bytes cross; each ends as late as its FLOPs allow. If these are few enough, cutting them gives
    as many as are asked for.
    """
    count, crossing = problem.flops.size, problem.received.crossing
    sizes = np.sort(crossing)

    def suffices(number: int) -> bool:
        begins = np.flatnonzero(crossing <= sizes[number])
        ends = np.searchsorted(lows, begins, side="right")
        nexts = (np.searchsorted(begins, ends, side="right") - 1).tolist()
        is_last = (ends == count).tolist()
        layer = 0
        for _ in range(problem.num_layers - 1):
            layer = nexts[layer]
        return is_last[layer] and len(begins) >= problem.num_layers

    first = bisect_left(range(count), True, key=suffices)
    return float(sizes[first]) if first < count else inf


_Layers = Callable[[np.ndarray, int, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Where layers that end with an op may begin, that op, and what they receive: where they begin of
these, and what they cost"""


def _recursion(
    num_layers: int, received: Received, lows: np.ndarray, layers: _Layers, join: np.ufunc
) -> tuple[np.ndarray, np.ndarray]:
    """best[r, n] and first op of the last layer, for the first n ops in r layers.

    A layer that ends with op k begins at lows[k]..k, as far as ``layers`` allows it. ``join`` adds
    its cost to that of the layers before.
    """
    count = lows.size
    best = np.full((num_layers + 1, count + 1), inf)
    best[0, 0] = 0.0
    first = np.zeros((num_layers + 1, count + 1), dtype=np.int32)
    every, rows, room = np.arange(count), np.arange(num_layers), np.empty((num_layers, count))
    for k, (low, column) in enumerate(zip(lows.tolist(), received.columns(), strict=True)):
        begins, costs = layers(every[low : k + 1], k, column[low:])
        if not begins.size:
            continue
        before = best[:-1, low : k + 1]
        if begins.size < before.shape[1]:
            before = before[:, begins - low]
        values = join(before, costs, out=room[:, : begins.size])
        at = values.argmin(axis=1)
        best[1:, k + 1] = values[rows, at]
        first[1:, k + 1] = begins[at]
    return best, first


def _least_bound(sums: npt.NDArray[np.float64], low: float, num_layers: int) -> float:
    """The least FLOPs, `low` or more, to which layers can be limited: bisection with greedy layers.

    Args:
        sums: the FLOPs of the first n ops, for each n from 0.
        low: no less than the FLOPs of each op.
    """

    def suffices(bound: float) -> bool:
        ends = np.searchsorted(sums, sums + bound, side="right") - 1
        end = 0
        for _ in range(num_layers):
            end = ends[end]
        return bool(end == sums.size - 1)

    high = low if suffices(low) else float(sums[-1])
    while low < high * (1 - _ROUNDING):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes the largest input, and checks each layer. Raises ``VerificationError``."""
    starts, count = solution.starts, problem.flops.size
    ends = (*starts[1:], count)
    if len(starts) != problem.num_layers or starts[0] != 0:
        raise VerificationError(
            f"{problem.num_layers} layers from op 0 on were asked for, not {starts}"
        )
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        raise VerificationError(
            f"a layer is empty: layers begin at {starts}, there are {count} ops"
        )
    inputs = [problem.received.by_layer(*each) for each in zip(starts, ends, strict=True)]
    if max(inputs) != solution.largest_input:
        raise VerificationError(
            f"the largest input is {max(inputs)} B, not {solution.largest_input} B"
        )
    flops = np.add.reduceat(problem.flops, starts)
    if flops.max() > solution.flop_bound * (1 + 1e-9):
        raise VerificationError(
            f"a layer has {flops.max()} FLOPs, the bound is {solution.flop_bound}"
        )
