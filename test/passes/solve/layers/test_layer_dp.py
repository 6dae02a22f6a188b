from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.layers.layer_dp import (
    Problem,
    Received,
    Solution,
    solve,
    solve_narrow,
    verify,
)

Value = tuple[int, float, tuple[int, ...]]


def brute_received(num_ops: int, values: list[Value]) -> np.ndarray:
    received = np.zeros((num_ops, num_ops))
    for i in range(num_ops):
        for k in range(i, num_ops):
            received[i, k] = sum(
                size
                for p, size, consumers in values
                if p < i and any(i <= c <= k for c in consumers)
            )
    return received


def matrix(received: Received) -> np.ndarray:
    """received[i, k]: bytes that ops i..k receive from ops before i."""
    found = np.zeros((received.num_ops, received.num_ops))
    for k, column in enumerate(received.columns()):
        found[: k + 1, k] = column
    return found


def covers(layers: tuple[tuple[int, int], ...], num_ops: int) -> bool:
    """Whether layers (first op, last op) follow one another, from op 0 to the last op."""
    nexts = [0, *(last + 1 for _, last in layers)]
    return nexts == [*(first for first, _ in layers), num_ops]


def brute_force(problem: Problem, bound: float) -> tuple[float, float]:
    """(largest input, variance) of the best clustering whose layers have at most ``bound``."""
    count, received = problem.flops.size, matrix(problem.received)
    found = []
    for cuts in combinations(range(1, count), problem.num_layers - 1):
        starts = (0, *cuts)
        flops = np.add.reduceat(problem.flops, starts)
        if flops.max() <= bound * (1 + 1e-9):
            ends = (*cuts, count)
            largest = max(received[s, e - 1] for s, e in zip(starts, ends, strict=True))
            found.append((float(largest), float(np.var(flops))))
    return min(found)


@st.composite
def values_of(draw: st.DrawFn, num_ops: int) -> list[Value]:
    values: list[Value] = []
    for _ in range(draw(st.integers(0, 8))):
        producer = draw(st.integers(0, num_ops - 1))
        later = st.sampled_from(range(producer + 1, num_ops)) if producer + 1 < num_ops else None
        consumers = draw(st.sets(later, max_size=4)) if later is not None else set()
        values.append((producer, float(draw(st.integers(1, 5))), tuple(sorted(consumers))))
    return values


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 8))
    flops = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0]), min_size=count, max_size=count))
    return Problem(
        flops=np.array(flops),
        received=Received(count, draw(values_of(count))),
        num_layers=draw(st.integers(1, count)),
        delta=draw(st.sampled_from([0.0, 0.2, 1.0, 10.0])),
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_ops=st.integers(1, 9))
def test_received_bytes_equals_brute_force(data, num_ops):
    values = data.draw(values_of(num_ops))
    received, expected = Received(num_ops, values), brute_received(num_ops, values)
    assert np.array_equal(matrix(received), expected)
    assert np.array_equal(received.crossing, expected[:, -1])
    begins = np.flatnonzero([True, *(data.draw(st.booleans()) for _ in range(num_ops - 1))])
    ends = np.append(begins[1:], num_ops) - 1
    assert np.array_equal(matrix(received.joined(begins)), np.triu(expected[np.ix_(begins, ends)]))
    layers = [(i, k) for i in range(num_ops) for k in range(i, num_ops)]
    assert all(received.by_layer(i, k + 1) == expected[i, k] for i, k in layers)
    most = data.draw(st.integers(0, 12))
    few = [(i, k) for i, k in layers if expected[i, k] <= most]
    useful = {
        i for n in (1, 2, 3) for cut in combinations(few, n) if covers(cut, num_ops) for i, _ in cut
    }
    assert useful <= set(received.begins(most).tolist())


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_equals_brute_force(problem):
    solution = solve(problem)
    asked = (1 + problem.delta) * problem.flops.sum() / problem.num_layers
    count = problem.flops.size
    least = min(
        np.add.reduceat(problem.flops, (0, *cuts)).max()
        for cuts in combinations(range(1, count), problem.num_layers - 1)
    )
    assert solution.flop_bound == pytest.approx(max(asked, least))
    largest, variance = brute_force(problem, solution.flop_bound)
    assert solution.largest_input == largest
    flops = np.add.reduceat(problem.flops, solution.starts)
    assert np.var(flops) == pytest.approx(variance, abs=1e-9)


def test_cuts_where_little_flows():
    received = Received(4, [(0, 100.0, (1,)), (1, 1.0, (2, 3)), (2, 100.0, (3,))])
    problem = Problem(flops=np.ones(4), received=received, num_layers=2, delta=0.0)
    assert solve(problem).starts == (0, 2)
    assert solve(problem).largest_input == 1.0


def test_one_op_above_the_bound_relaxes_it():
    problem = Problem(
        flops=np.array([1.0, 50.0, 1.0]), received=Received(3), num_layers=2, delta=0.5
    )
    solution = solve(problem)
    assert solution.flop_bound == 51.0
    assert solution.starts in {(0, 1), (0, 2)}


def sequence(count: int, num_layers: int) -> Problem:
    """Ops that read the previous op and one of the 30 before it; a fifth of the ops are large."""
    rng = np.random.default_rng(0)
    values = [
        (
            p,
            float(rng.integers(1, 10**6)),
            sorted({p + 1, min(count - 1, p + int(rng.integers(30)) + 1)}),
        )
        for p in range(count - 1)
    ]
    flops = np.where(rng.random(count) < 0.2, rng.random(count) * 1e12, rng.random(count) * 1e8)
    received = Received(count, values)
    return Problem(flops=flops, received=received, num_layers=num_layers, delta=0.1)


def test_3000_ops_in_48_layers():
    assert len(solve(sequence(3000, 48)).starts) == 48


def test_an_op_is_one_step_for_numpy(num_calls):
    """For any number of layers and of ops that a layer may begin with."""
    few, many, more_layers = (
        num_calls(lambda problem=problem: solve(problem))
        for problem in (sequence(500, 10), sequence(1000, 10), sequence(500, 20))
    )
    assert many <= 2 * few
    assert more_layers <= 1.1 * few


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4}, "3 ops cannot form 4 layers: ask for 1 to 3"),
        ({"num_layers": 0}, "cannot form 0 layers"),
        ({"received": Received(2)}, "received must be of 3 ops, not 2"),
        ({"received": Received(3, [(0, np.inf, (1,))])}, "received must be finite"),
        ({"flops": np.array([1.0, np.nan, 1.0])}, "flops must be finite"),
        ({"delta": -1.0}, "delta not negative"),
    ],
)
def test_check(changes, message):
    good = Problem(flops=np.ones(3), received=Received(3), num_layers=2, delta=0.5)
    with pytest.raises(ValueError, match=message):
        solve(replace(good, **changes))


def test_verify_rejects_what_is_wrong():
    received = Received(3, [(0, 4.0, (1,)), (1, 2.0, (2,))])
    problem = Problem(flops=np.array([1.0, 1.0, 2.0]), received=received, num_layers=2, delta=0.0)
    good = Solution(starts=(0, 2), largest_input=2.0, flop_bound=2.0)
    verify(problem, good)
    for wrong, message in [
        (replace(good, starts=(0,)), "2 layers from op 0"),
        (replace(good, starts=(1, 2)), "2 layers from op 0"),
        (replace(good, starts=(0, 3)), "empty"),
        (replace(good, largest_input=1.0), "2.0 B, not 1.0 B"),
        (replace(good, starts=(0, 1), largest_input=4.0), "has 3.0 FLOPs"),
    ]:
        with pytest.raises(VerificationError, match=message):
            verify(problem, wrong)


def chain_of_blocks(heavy: float, wide: float) -> Problem:
    """Eight pairs of a light and a heavy block, as GShard's: wide inside of the heavy ones."""
    block = [(1.0, 1.0), (heavy / 2, wide), (heavy / 2, 1.0)]
    ops = block * 8
    values = [(n, size, (n + 1,)) for n, (_, size) in enumerate(ops[:-1])]
    flops = np.array([flops for flops, _ in ops])
    return Problem(flops=flops, received=Received(len(ops), values), num_layers=16, delta=0.5)


def test_fewer_layers_are_taken_where_they_receive_less() -> None:
    problem = chain_of_blocks(heavy=6.0, wide=9.0)
    assert solve(problem).largest_input == 9.0
    found = solve_narrow(problem, 8)
    assert (found.starts, found.largest_input) == (tuple(range(0, 24, 3)), 1.0)
    every = [solve(replace(problem, num_layers=count)) for count in range(8, 17)]
    assert found.largest_input == min(one.largest_input for one in every)


@pytest.mark.parametrize(("heavy", "wide"), [(6.0, 1.9), (1.0, 9.0)])
def test_the_usual_number_of_layers_stays_where_fewer_gain_little(
    heavy: float, wide: float
) -> None:
    problem = chain_of_blocks(heavy=heavy, wide=wide)
    assert solve_narrow(problem, 8) == solve(problem)
    assert solve_narrow(problem, 16) == solve(problem)
