"""Segments of least memory against brute force over all cuts."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.layers.segment_dp import Problem, Solution, memory, solve, verify


def random_problem(seed: int) -> Problem:
    """Up to 9 positions; many sizes are equal, some are zero."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 10))
    kept, held = rng.integers(0, 6, (2, count, count)).astype(float)
    # The longer a segment is, the more it holds.
    held *= np.subtract.outer(np.arange(count), np.arange(count)).__abs__()
    return Problem(kept=kept, held=held, weight=float(rng.choice([0.0, 0.5, 1.0, 3.0])))


@given(seed=st.integers(0, 10_000))
def test_no_cuts_take_less(seed: int) -> None:
    problem = random_problem(seed)
    inside = range(1, len(problem.kept) - 1)
    every = chain.from_iterable(combinations(inside, n) for n in range(len(inside) + 1))
    found = solve(problem)
    assert found.objective == pytest.approx(min(memory(problem, cuts) for cuts in every))


def test_a_chain_of_equal_blocks_is_cut_between_them() -> None:
    """Nine blocks of 9 bytes with 1 byte between: with weight 1, three segments of 27 and 2 bytes
    kept take 29, nine segments 9 + 8 = 17. With weight 8, three take 43 and nine take 73."""
    positions = np.arange(10)
    held = 9.0 * np.abs(np.subtract.outer(positions, positions))
    kept = np.ones((10, 10))
    kept[:, -1] = 0.0
    assert solve(Problem(kept=kept, held=held, weight=1.0)).cuts == (1, 2, 3, 4, 5, 6, 7, 8)
    found = solve(Problem(kept=kept, held=held, weight=9.0))
    assert (len(found.cuts), found.objective) == (2, 45.0)


def test_what_is_no_problem_is_refused() -> None:
    square = np.zeros((3, 3))
    with pytest.raises(ValueError, match="equally large"):
        solve(Problem(kept=square, held=np.zeros((2, 2)), weight=1.0))
    with pytest.raises(ValueError, match="weight must be finite"):
        solve(Problem(kept=square, held=square, weight=-1.0))
    with pytest.raises(ValueError, match="bytes must be"):
        solve(Problem(kept=square - 1, held=square, weight=1.0))


def test_wrong_solutions_are_found() -> None:
    problem = random_problem(3)
    found = solve(problem)
    with pytest.raises(VerificationError, match="the segments take"):
        verify(problem, Solution(cuts=found.cuts, objective=found.objective + 1))
    with pytest.raises(VerificationError, match="not ascending"):
        verify(problem, Solution(cuts=(0,), objective=found.objective))
