from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.placement import Group, submeshes
from alpa.passes.solve.stages.problem import NoCutError, Problem, Solution, Stage, verify
from alpa.passes.solve.stages.stage_dp import solve


def allowed_cuts(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    layers = problem.num_layers
    sizes = [n * m for n, m in problem.submeshes]
    for count in range(1, layers + 1):
        if problem.num_stages not in (None, count):
            continue
        for cuts in combinations(range(1, layers), count - 1):
            bounds = list(zip((0, *cuts), (*cuts, layers), strict=True))
            for meshes in product(range(len(sizes)), repeat=count):
                if sum(sizes[m] for m in meshes) == problem.num_devices:
                    yield tuple(
                        Stage(first=a, last=b - 1, submesh=m)
                        for (a, b), m in zip(bounds, meshes, strict=True)
                    )


def fitting_cuts(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    for stages in allowed_cuts(problem):
        fits = all(
            problem.max_in_flight[s.first, s.last, s.submesh]
            >= problem.in_flight(len(stages) - n, len(stages))
            and problem.t[s.first, s.last, s.submesh] < inf
            for n, s in enumerate(stages)
        )
        if fits:
            yield stages


def brute_force(problem: Problem) -> float:
    return min(map(problem.objective, fitting_cuts(problem)), default=inf)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    hosts, devices = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (3, 2), (4, 2)]))
    layers = draw(st.integers(1, 5))
    shapes = submeshes(hosts, devices)
    unit = draw(st.sampled_from([1, 1, 2, 4, 8]))
    shapes = tuple((n, m) for n, m in shapes if n * m % unit == 0) or shapes
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (layers, layers, len(shapes))
    times = rng.integers(1, 10, size) * 1e-3 if draw(st.booleans()) else rng.random(size)
    times = np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), inf, times)
    limits = draw(st.sampled_from([[10**6], [0, 1, 2, 3, 10**6], [1, 2, 10**6]]))
    return Problem(
        groups=(Group(0, hosts, devices),),
        submeshes=shapes,
        t=times,
        u=rng.random(size) * draw(st.sampled_from([0.0, 1.0, 30.0])),
        max_in_flight=rng.choice(limits, size),
        c=np.concatenate([np.zeros((1, len(shapes), 2)), rng.random((layers - 1, len(shapes), 2))]),
        num_micro_batches=draw(st.sampled_from([1, 2, 5, 64])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"])),
        hidden=rng.random((len(shapes), 2)) if draw(st.booleans()) else None,
        num_stages=draw(st.sampled_from([None, None, 1, 2, 3])),
        minimise=draw(st.sampled_from(["step", "step", "throughput"])),
        back=np.concatenate(
            [rng.random((layers - 1, len(shapes), 2)), np.zeros((1, len(shapes), 2))]
        ),
    )


def check(problem: Problem) -> None:
    """That the solution is as good as that of brute force."""
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(NoCutError):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_equals_brute_force(problem):
    check(problem)


@settings(max_examples=50, deadline=None)
@given(problem=problems(), schedule=st.sampled_from(["zb-v", "v-half", "dualpipe-v"]))
def test_several_stages_on_each_mesh(problem: Problem, schedule: str) -> None:
    """A stage has a device of its own here: an even share of that of its mesh."""
    layers, shapes = problem.num_layers, ((1, 1),)
    count = 2 * max(1, layers // 2)
    if layers < count:
        return
    problem = replace(
        problem,
        groups=(Group(0, count, 1),),
        submeshes=shapes,
        hidden=None,
        num_micro_batches=count + 2,
        schedule=schedule,
        num_stages=count,
        minimise="step",
        **{name: getattr(problem, name)[..., :1] for name in ("t", "u", "max_in_flight")},
        **{name: getattr(problem, name)[:, :1] for name in ("c", "back")},
    )
    check(problem)


def uniform(layers: int = 4, hosts: int = 1, devices: int = 4) -> Problem:
    """Each layer takes 1 s on one device, and speeds up perfectly."""
    shapes = submeshes(hosts, devices)
    sizes = np.array([n * m for n, m in shapes])
    count = np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1.0
    times = np.where(count > 0, count, inf)[:, :, None] / sizes
    return Problem(
        groups=(Group(0, hosts, devices),),
        submeshes=shapes,
        t=times,
        u=np.zeros_like(times),
        max_in_flight=np.full(times.shape, 10**6),
        c=np.zeros((layers, len(shapes), 2)),
        back=np.zeros((layers, len(shapes), 2)),
        num_micro_batches=8,
        schedule="1f1b",
    )


def test_thousands_of_devices_are_counted_in_units():
    shapes = tuple((n, 8) for n in (128, 256, 512))
    one = uniform(16, 512, 8)
    at = [one.submeshes.index(shape) for shape in shapes]
    times, links = one.t[:, :, at], np.zeros((16, 3, 2))
    few = replace(one, submeshes=shapes, t=times, u=np.zeros_like(times), c=links, back=links)
    few = replace(few, max_in_flight=one.max_in_flight[:, :, at], num_stages=3)
    solution = solve(few)
    assert sorted(s.submesh for s in solution.stages) == [0, 0, 1]
    layers = {s.submesh: s.last - s.first + 1 for s in solution.stages}
    assert layers == {0: 4, 1: 8}
    assert solution.objective == pytest.approx((3 + 7) * 4 / 1024)


def test_perfect_speedup_makes_one_stage():
    assert solve(uniform()).stages == (Stage(first=0, last=3, submesh=2),)
    assert solve(uniform()).objective == 8.0


def test_num_stages_is_kept():
    solution = solve(replace(uniform(), num_stages=4))
    assert [s.first for s in solution.stages] == [0, 1, 2, 3]
    assert solution.objective == 4.0 + 7 * 1.0


def test_transfers_move_the_cut():
    transfers = np.broadcast_to(np.array([0.0, 9.0, 9.0, 0.5])[:, None, None], (4, 3, 2))
    solution = solve(replace(uniform(), num_stages=2, c=transfers))
    assert solution.stages[1].first == 3


def test_hidden_transfers_are_waited_for_once():
    """Two stages of 4 s; the transfer of 2 s into the second is hidden by three quarters."""
    transfers = np.broadcast_to(np.array([0.0, 9.0, 2.0, 9.0])[:, None, None], (4, 3, 2))
    hidden = np.full((3, 2), 0.75)
    problem = replace(uniform(), num_stages=2, c=transfers, hidden=hidden)
    assert solve(problem).objective == (1.0 + 1.0 + 2.0) + 7 * (1.0 + 0.5)
    # Longer than the work of a micro-batch.
    slow = replace(problem, c=4 * transfers)
    assert solve(slow).objective == (1.0 + 1.0 + 8.0) + 7 * (0.75 * 8.0)


@pytest.mark.parametrize("hidden", [np.full((3, 2), 1.1), np.full((3, 2), -0.1), np.zeros(3)])
def test_shares_that_are_none(hidden):
    with pytest.raises(ValueError, match="hidden must"):
        solve(replace(uniform(), hidden=hidden))


def test_a_cut_between_hosts_moves_what_is_cheap_to_send():
    """Two hosts of two devices, four equal stages: the middle cut is the one between hosts."""
    problem = replace(uniform(4, 2, 2), num_stages=4)
    transfers = np.zeros((4, 3, 2))
    transfers[2, :, 1] = 5.0
    assert solve(replace(problem, c=transfers)).objective == 4.0 + 5.0 + 7 * 6.0
    transfers = np.zeros((4, 3, 2))
    transfers[[1, 3], :, 1] = 5.0
    assert solve(replace(problem, c=transfers)).objective == 4.0 + 7 * 1.0


def test_a_transfer_is_its_receivers():
    """The later stage's results return to the earlier stage, which is then the longer one."""
    problem = replace(uniform(2), t=uniform(2).t * np.array([[[2.0]], [[1.0]]]), num_stages=2)
    transfers = np.zeros((2, 3, 2))
    transfers[0] = 1.0
    assert solve(problem).objective == 1.0 + 0.5 + 7 * 1.0
    assert solve(replace(problem, back=transfers)).objective == 2.0 + 0.5 + 7 * 2.0
    assert solve(replace(problem, c=transfers[::-1])).objective == 1.0 + 1.5 + 7 * 1.5


def test_throughput_takes_the_least_longest_stage_then_the_least_sum():
    """One stage on all devices gains less than four stages on one each; at half the speed, stages
    cost T only.
    """
    problem = uniform()
    slow = problem.t * np.array([1.0, 1.1, 1.2])
    fast = solve(replace(problem, t=slow, minimise="throughput"))
    assert [s.submesh for s in fast.stages] == [0, 0, 0, 0]
    assert fast.objective == 1.0
    # All cuts are equal but for their sums: one stage has the least.
    even = replace(problem, minimise="throughput")
    assert solve(even).stages == (Stage(first=0, last=3, submesh=2),)


def test_a_mesh_with_faster_links_is_worth_slower_layers():
    problem = replace(uniform(2, 1, 4), num_stages=2)
    assert [s.submesh for s in solve(problem).stages] == [1, 1]
    transfers = np.zeros((2, 3, 2))
    transfers[1] = [[9.0], [9.0], [0.0]]
    views = (*problem.submeshes[:2], (1, 2))
    slower = problem.t[:, :, [0, 1, 1]] * np.array([1.0, 1.0, 1.5])
    wide = replace(problem, submeshes=views, t=slower, u=np.zeros_like(slower), c=transfers)
    assert [s.submesh for s in solve(wide).stages] == [1, 2]


def test_first_stage_keeps_more_in_flight():
    """Two stages: the first keeps two micro-batches, and only three layers of it fit."""
    limits = np.full((4, 4, 3), 10**6)
    limits[0, 3] = 0
    limits[0, 1] = 1
    solution = solve(replace(uniform(), num_stages=2, max_in_flight=limits))
    assert solution.stages[1].first != 2
    again = solve(replace(uniform(), num_stages=2, max_in_flight=limits, num_micro_batches=1))
    assert again.objective == 4 / 2


def test_48_layers_on_64_devices():
    problem = uniform(48, 8, 8)
    rng = np.random.default_rng(0)
    problem = replace(
        problem,
        t=problem.t * (1 + 0.1 * rng.random(problem.t.shape)),
        u=np.where(problem.t < inf, rng.random(problem.t.shape), inf),
        max_in_flight=rng.integers(2, 200, problem.t.shape),
        c=np.concatenate([np.zeros((1, 11, 2)), rng.random((47, 11, 2)) * 0.05]),
        num_micro_batches=64,
    )
    # Bisection of all values of max a, without u, would take as many DPs.
    values = np.unique(problem.t[problem.t < inf]).size
    assert solve(problem).evaluations <= np.log2(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_stages": 5},
            "cannot be cut in 5 stages so that submeshes of 1x1, 1x2, 1x4 use all 4",
        ),
        ({"t": np.full((4, 4, 3), inf)}, "no plan on their submesh"),
        ({"max_in_flight": np.zeros((4, 4, 3), dtype=int)}, "even with one micro-batch in flight"),
        (
            {"max_in_flight": np.ones((4, 4, 3), dtype=int), "schedule": "gpipe"},
            r"gpipe keeps in flight \(8 micro-batches\)",
        ),
        (
            {"max_in_flight": np.ones((4, 4, 3), dtype=int), "num_stages": 2},
            r"1f1b keeps in flight \(8 micro-batches\)",
        ),
    ],
)
def test_infeasible_says_what_binds(changes, message):
    with pytest.raises(NoCutError, match=message):
        solve(replace(uniform(), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"u": np.zeros((4, 4, 2))}, r"u must have shape \(4, 4, 3\), not \(4, 4, 2\)"),
        ({"c": np.ones((4, 3, 2))}, "c must be 0 for the first layer"),
        ({"c": np.zeros((4, 3))}, r"c must have shape \(4, 3, 2\), not \(4, 3\)"),
        ({"back": np.ones((4, 3, 2))}, "back for the last"),
        ({"num_micro_batches": 0}, "at least 1"),
        ({"t": np.full((4, 4, 3), -1.0)}, "t must not be negative"),
    ],
)
def test_check(changes, message):
    with pytest.raises(ValueError, match=message):
        solve(replace(uniform(), **changes))


def test_verify_rejects_what_is_wrong():
    limits = np.full((4, 4, 3), 10**6)
    limits[0, 0] = 1
    problem = replace(uniform(), num_stages=2, max_in_flight=limits)
    stages = (Stage(first=0, last=1, submesh=1), Stage(first=2, last=3, submesh=1))
    good = Solution(stages=stages, objective=9.0, evaluations=1)
    verify(problem, good)
    for wrong, message in [
        ((stages[0], Stage(first=3, last=3, submesh=1)), "are no cut of 4 layers"),
        ((stages[0], Stage(first=2, last=3, submesh=0)), "use 3 devices"),
        ((Stage(first=0, last=3, submesh=2),), "1 stages, 2 were asked for"),
        ((Stage(first=0, last=0, submesh=1), Stage(first=1, last=3, submesh=1)), "admits 1"),
        ((Stage(first=0, last=2, submesh=1), Stage(first=3, last=3, submesh=1)), "not 9.0 s"),
    ]:
        with pytest.raises(VerificationError, match=message):
            verify(problem, replace(good, stages=wrong))
