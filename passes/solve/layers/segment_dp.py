"""Cuts a sequence of ops into segments, one of which is computed again at a time.

Values that cross a cut are kept; all others of a segment are computed again when they are needed,
and then live at the same time. With `kept[i, j]` and `held[i, j]` for the segment between positions
i and j, the segments 0 = p_0 < p_1 < ... < p_m = P - 1 of least memory are

    min over p of  weight * sum_k kept[p_k, p_(k+1)] + max_k held[p_k, p_(k+1)]

Position by position, the pairs (sum, max) that no other pair beats in both are extended: exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from alpa.passes.solve.errors import VerificationError


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """P positions, the first and the last of which are the ends of the sequence."""

    kept: np.ndarray
    """[P, P], i < j: bytes of what is made between i and j and read after j"""
    held: np.ndarray
    """[P, P], i < j: bytes of what is computed again between i and j"""
    weight: float
    """how often what is kept is in memory, while a segment is there once"""

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        count = len(self.kept)
        if count < 2 or self.kept.shape != (count, count) or self.held.shape != (count, count):
            raise ValueError(
                f"kept and held must be square and equally large, with 2 positions or more, not "
                f"{self.kept.shape} and {self.held.shape}"
            )
        if not (np.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"the weight must be finite and not negative, not {self.weight}")
        sizes = np.stack([np.triu(self.kept, 1), np.triu(self.held, 1)])
        if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
            raise ValueError("bytes must be finite and not negative")


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The positions between segments, without the ends."""

    cuts: tuple[int, ...]
    objective: float


_Entry = tuple[float, float, int, int]
"""Weighted bytes kept, bytes of the largest segment, and the position and entry before"""


def solve(problem: Problem) -> Solution:
    """The segments of least memory; of equal ones those with the fewest bytes kept.

    Raises:
        ValueError: this is no problem.
    """
    problem.check()
    count = len(problem.kept)
    kept, held = (problem.weight * problem.kept).tolist(), problem.held.tolist()
    most = held[0][-1] + kept[0][-1]
    """what one segment takes: nothing above leads to the best"""
    fronts: list[list[_Entry]] = [[(0.0, 0.0, -1, -1)]]
    for j in range(1, count):
        found: list[_Entry] = []
        for i in range(j):
            more, segment = kept[i][j], held[i][j]
            for n, (paid, largest, _, _) in enumerate(fronts[i]):
                now = max(largest, segment)
                if paid + more + now <= most:
                    found.append((paid + more, now, i, n))
        found.sort()
        front: list[_Entry] = []
        least = inf
        for entry in found:
            if entry[1] < least:
                front.append(entry)
                least = entry[1]
        fronts.append(front)
    objective, _, at = min(
        (paid + largest, paid, n) for n, (paid, largest, _, _) in enumerate(fronts[-1])
    )
    cuts: list[int] = []
    j = count - 1
    while j > 0:
        _, _, j, at = fronts[j][at]
        cuts.append(j)
    solution = Solution(cuts=tuple(reversed(cuts[:-1])), objective=objective)
    verify(problem, solution)
    return solution


def memory(problem: Problem, cuts: Sequence[int]) -> float:
    """The bytes that segments between cuts take."""
    segments = list(pairwise((0, *cuts, len(problem.kept) - 1)))
    kept = sum(float(problem.kept[segment]) for segment in segments)
    return problem.weight * kept + max(float(problem.held[segment]) for segment in segments)


def verify(problem: Problem, solution: Solution) -> None:
    """Checks the order of the cuts, and recomputes the bytes. Raises ``VerificationError``."""
    ends = (0, *solution.cuts, len(problem.kept) - 1)
    if any(i >= j for i, j in pairwise(ends)):
        raise VerificationError(f"cuts {solution.cuts} are not ascending inside of 0 to {ends[-1]}")
    found = memory(problem, solution.cuts)
    if abs(found - solution.objective) > 1e-9 * max(found, 1.0):
        raise VerificationError(f"the segments take {found} B, not {solution.objective} B")
