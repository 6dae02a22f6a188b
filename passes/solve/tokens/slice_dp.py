"""Cuts a batch of sequences into token slices: TeraPipe's dynamic program, over the batch too.

Samples go through a pipeline of K equal stages together, in batch slices of b samples; each batch
slice is cut along its sequences. A token slice takes t(b, l, c) seconds on a stage, where l is its
length and c its context, the tokens of its sequences before it. The least of

    T = sum of all t + (K - 1) max of all t                                     (thesis, eq. 2.5)

is found by its largest term: for a bound t_max,

    S_b(i) = min over l of S_b(i - l) + t(b, l, i - l)  if t(b, l, i - l) <= t_max     (eq. 2.8)
    P(m)   = min over b of P(m - b) + S_b(whole sequence),            P(samples) = S(t_max)

and T = min over t_max of S(t_max) + (K - 1) t_max. The pipeline fills once per step, so
(K - 1) t_max is added once, whatever the number of batch slices. The thesis adds the T of each
batch slice instead (section 2.3.4), which counts the fill once per batch slice.

S falls as t_max grows. So the T of all t_max from x to y is at least S(y) + (K - 1) x, and S is
constant from the longest slice of an optimum up to its t_max. `solve` bisects the values of t until
no interval can hold a shorter T: the result is exact. A bound takes O(B n^2) for sequences of n
units and slices of up to B samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, isclose

import numpy as np

from alpa.passes.solve.errors import VerificationError

_ROUNDING = 1e-9
"""Sums of seconds in another order are equal up to this part."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A batch for a pipeline. Lengths and contexts are numbers of units, such as 8 tokens."""

    seconds: np.ndarray
    """``seconds[b - 1, l - 1, c]``: what a stage takes for the forward and backward of b samples, l
    units of each, after c units; [B, n, n] for sequences of n units; infinite if it is not
    possible; no meaning where l + c > n"""
    num_samples: int
    """of the whole batch; the slices that it is cut into have at most B"""
    num_stages: int

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        if self.seconds.ndim != 3 or not self.seconds.size:
            raise ValueError(
                f"seconds must be samples x length x context, not {self.seconds.shape}"
            )
        _, lengths, contexts = self.seconds.shape
        if lengths != contexts:
            raise ValueError(
                f"a sequence of {lengths} units has slices after 0 to {lengths - 1} units, "
                f"not {contexts} contexts"
            )
        if self.num_samples < 1 or self.num_stages < 1:
            raise ValueError(
                f"{self.num_samples} samples on {self.num_stages} stages: both must be positive"
            )
        used = self.seconds[:, _within(lengths)]
        if np.isnan(used).any() or (used < 0).any():
            raise ValueError("seconds must not be negative or NaN")


@dataclass(frozen=True, kw_only=True)
class BatchSlice:
    """Samples that go through the pipeline together."""

    samples: int
    lengths: tuple[int, ...]
    """of its token slices, in units, from the first token on"""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The slices in the order in which the pipeline takes them."""

    batch_slices: tuple[BatchSlice, ...]
    seconds: float
    """T"""


def solve(problem: Problem) -> Solution:
    """The slices of least T.

    Raises:
        ValueError: this is no problem, or no slices are possible.
    """
    problem.check()
    by_end = _by_end(problem.seconds)
    values = np.unique(by_end[np.isfinite(by_end)])
    fill = problem.num_stages - 1
    best: tuple[float, tuple[BatchSlice, ...]] = (inf, ())
    # (least possible T, first and last index of t_max, least S)
    open_: list[tuple[float, int, int, float]] = []
    if values.size:
        open_.append((0.0, 0, values.size - 1, 0.0))
    at = values.size - 1
    while open_:
        least, low, high, total_of_high = heappop(open_)
        if least >= best[0]:
            break
        if best[1]:
            at = (low + high) // 2
        total, longest, slices = _least_sum(by_end, float(values[at]), problem.num_samples)
        if total + fill * longest < best[0]:
            best = (total + fill * longest, slices)
        # Between its longest slice and t_max, the same slices are best.
        below = int(np.searchsorted(values, longest)) - 1 if slices else -1
        for first, last, least_sum in ((low, below, total), (at + 1, high, total_of_high)):
            if first <= last:
                bound = least_sum + fill * float(values[first])
                heappush(open_, (bound, first, last, least_sum))
    if not best[1]:
        raise ValueError(
            f"no slices of {problem.seconds.shape[1]} units take finite time: shorter or longer "
            "ones must be possible"
        )
    solution = Solution(batch_slices=best[1], seconds=best[0])
    verify(problem, solution)
    return solution


def latency(problem: Problem, batch_slices: tuple[BatchSlice, ...]) -> float:
    """T of any slices, in seconds."""
    times = [
        float(problem.seconds[part.samples - 1, length - 1, context])
        for part in batch_slices
        for length, context in zip(part.lengths, contexts(part.lengths), strict=True)
    ]
    # A slice that is not possible on one stage: infinity, not 0 times infinity.
    return max(times) if max(times) == inf else sum(times) + (problem.num_stages - 1) * max(times)


def contexts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The units before each slice."""
    return tuple(sum(lengths[:at]) for at in range(len(lengths)))


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes T, and checks that the slices cover the batch. Raises ``VerificationError``."""
    most, units, _ = problem.seconds.shape
    covered = sum(part.samples for part in solution.batch_slices)
    if covered != problem.num_samples:
        raise VerificationError(f"the slices have {covered} samples of {problem.num_samples}")
    for part in solution.batch_slices:
        if not 1 <= part.samples <= most:
            raise VerificationError(f"a slice has {part.samples} samples, at most {most} may be")
        if sum(part.lengths) != units or min(part.lengths) < 1:
            raise VerificationError(f"slices of {part.lengths} units do not cover {units}")
    seconds = latency(problem, solution.batch_slices)
    if not isclose(seconds, solution.seconds, rel_tol=_ROUNDING):
        raise VerificationError(f"the slices take {seconds} s, not {solution.seconds} s")


def _within(units: int) -> np.ndarray:
    """Which of [length - 1, context] end within a sequence."""
    return np.add.outer(np.arange(1, units + 1), np.arange(units)) <= units


def _by_end(seconds: np.ndarray) -> np.ndarray:
    """Seconds as [samples - 1, end - 1, begin], infinite unless begin < end."""
    units = seconds.shape[1]
    result = np.full(seconds.shape, inf)
    for begin in range(units):
        result[:, begin:, begin] = seconds[:, : units - begin, begin]
    return result


def _least_sum(
    by_end: np.ndarray, t_max: float, num_samples: int
) -> tuple[float, float, tuple[BatchSlice, ...]]:
    """S(t_max), the seconds of its longest slice, and its slices, none if there are none."""
    most, units, _ = by_end.shape
    allowed = np.where(by_end <= t_max, by_end, inf)
    sums = np.full((most, units + 1), inf)
    sums[:, 0] = 0.0
    begins = np.zeros((most, units), dtype=int)
    for end in range(units):
        candidates = sums[:, : end + 1] + allowed[:, end, : end + 1]
        begins[:, end] = candidates.argmin(axis=1)
        sums[:, end + 1] = np.take_along_axis(candidates, begins[:, end, None], axis=1)[:, 0]
    batch = np.full(num_samples + 1, inf)
    batch[0] = 0.0
    taken = np.zeros(num_samples + 1, dtype=int)
    for samples in range(1, num_samples + 1):
        up_to = min(samples, most)
        candidates = batch[samples - up_to : samples][::-1] + sums[:up_to, units]
        taken[samples] = candidates.argmin() + 1
        batch[samples] = candidates.min()
    if batch[-1] == inf:
        return inf, inf, ()
    longest = 0.0
    slices: list[BatchSlice] = []
    left = num_samples
    while left:
        row = int(taken[left]) - 1
        lengths: list[int] = []
        end = units
        while end:
            begin = int(begins[row, end - 1])
            longest = max(longest, float(by_end[row, end - 1, begin]))
            lengths.append(end - begin)
            end = begin
        slices.append(BatchSlice(samples=row + 1, lengths=tuple(reversed(lengths))))
        left -= row + 1
    return float(batch[-1]), longest, tuple(slices)
