from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.tokens.slice_dp import (
    BatchSlice,
    Problem,
    Solution,
    contexts,
    latency,
    solve,
    verify,
)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    for count in range(total):
        for cuts in combinations(range(1, total), count):
            yield tuple(end - start for start, end in pairwise((0, *cuts, total)))


def brute_force(problem: Problem) -> float:
    """The least T over all cuts of the batch and of each of its slices."""
    most, units, _ = problem.seconds.shape
    batches = {tuple(sorted(sizes)) for sizes in compositions(problem.num_samples)}
    cuts = tuple(compositions(units))
    best = inf
    for sizes in batches:
        if max(sizes) <= most:
            for chosen in product(cuts, repeat=len(sizes)):
                times = [
                    problem.seconds[samples - 1, length - 1, sum(lengths[:at])]
                    for samples, lengths in zip(sizes, chosen, strict=True)
                    for at, length in enumerate(lengths)
                ]
                if max(times) < inf:
                    best = min(best, sum(times) + (problem.num_stages - 1) * max(times))
    return best


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    most, units = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    value = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 9.0, inf]) | st.floats(0.0, 10.0)
    count = most * units * units
    seconds = draw(st.lists(value, min_size=count, max_size=count))
    return Problem(
        seconds=np.array(seconds).reshape(most, units, units),
        num_samples=draw(st.integers(1, 3)),
        num_stages=draw(st.sampled_from([1, 2, 4, 50])),
    )


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_slices_take_least_time(problem: Problem) -> None:
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(ValueError, match="no slices"):
            solve(problem)
    else:
        assert solve(problem).seconds == pytest.approx(best, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_no_slice_is_possible(num_stages: int) -> None:
    problem = Problem(seconds=np.full((1, 2, 2), inf), num_samples=1, num_stages=num_stages)
    assert latency(problem, (BatchSlice(samples=1, lengths=(1, 1)),)) == inf
    with pytest.raises(ValueError, match="no slices of 2 units"):
        solve(problem)


def attention(most: int, units: int) -> np.ndarray:
    samples = np.arange(1, most + 1)[:, None, None]
    length, context = np.arange(1, units + 1)[:, None], np.arange(units)
    return 2.0 + samples * length * (1.0 + (context + length / 2) / units)


def test_later_slices_are_shorter() -> None:
    found = solve(Problem(seconds=attention(1, 40), num_samples=1, num_stages=8))
    (only,) = found.batch_slices
    assert len(only.lengths) > 3
    assert list(only.lengths) == sorted(only.lengths, reverse=True)


def test_the_pipeline_fills_once_for_all_batch_slices() -> None:
    one = Problem(seconds=attention(1, 12), num_samples=1, num_stages=4)
    three = replace(one, num_samples=3)
    assert solve(three).seconds < 3 * solve(one).seconds - 2 * 3 * 2.0


def test_few_stages_need_no_token_slices() -> None:
    found = solve(Problem(seconds=attention(1, 12), num_samples=3, num_stages=1))
    assert found.batch_slices == (BatchSlice(samples=1, lengths=(12,)),) * 3
    assert found.seconds == 3 * (2 + 12 * 1.5)


def test_no_more_samples_than_the_table_has_go_together() -> None:
    seconds = np.ones((2, 3, 3))
    found = solve(Problem(seconds=seconds, num_samples=5, num_stages=1))
    assert sorted(part.samples for part in found.batch_slices) == [1, 2, 2]
    assert found.seconds == 3


def test_entries_beyond_the_sequence_mean_nothing() -> None:
    seconds = attention(1, 6)
    spoiled = seconds.copy()
    for length, context in product(range(6), range(6)):
        if length + 1 + context > 6:
            spoiled[:, length, context] = np.nan
    problem = Problem(seconds=seconds, num_samples=2, num_stages=3)
    assert solve(replace(problem, seconds=spoiled)) == solve(problem)


def test_latency_of_given_slices() -> None:
    problem = Problem(seconds=attention(1, 4), num_samples=1, num_stages=3)
    times = [2 + 3 * (1 + 1.5 / 4), 2 + 1 * (1 + 3.5 / 4)]
    assert contexts((3, 1)) == (0, 3)
    assert latency(problem, (BatchSlice(samples=1, lengths=(3, 1)),)) == sum(times) + 2 * times[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.ones((2, 2))}, "samples x length x context"),
        ({"seconds": np.ones((1, 3, 2))}, "after 0 to 2 units, not 2 contexts"),
        ({"num_samples": 0}, "0 samples on 2 stages"),
        ({"num_stages": 0}, "1 samples on 0 stages"),
        ({"seconds": -np.ones((1, 2, 2))}, "negative or NaN"),
        ({"seconds": np.full((1, 2, 2), np.nan)}, "negative or NaN"),
    ],
)
def test_what_is_no_problem(changes: dict[str, Any], message: str) -> None:
    problem = Problem(seconds=np.ones((1, 2, 2)), num_samples=1, num_stages=2)
    with pytest.raises(ValueError, match=message):
        solve(replace(problem, **changes))


@pytest.mark.parametrize(
    ("slices", "seconds", "message"),
    [
        (((1, (2,)),), 1.0, "1 samples of 2"),
        (((2, (2,)),), 1.0, "has 2 samples, at most 1"),
        (((1, (2,)), (1, (1,))), 2.0, r"\(1,\) units do not cover 2"),
        (((1, (2, 0)), (1, (2,))), 2.0, "do not cover 2"),
        (((1, (2,)), (1, (2,))), 2.0, "take 3.0 s, not 2.0 s"),
    ],
)
def test_verify_finds_planted_faults(
    slices: tuple[tuple[int, tuple[int, ...]], ...], seconds: float, message: str
) -> None:
    problem = Problem(seconds=np.ones((1, 2, 2)), num_samples=2, num_stages=2)
    parts = tuple(BatchSlice(samples=samples, lengths=lengths) for samples, lengths in slices)
    with pytest.raises(VerificationError, match=message):
        verify(problem, Solution(batch_slices=parts, seconds=seconds))
