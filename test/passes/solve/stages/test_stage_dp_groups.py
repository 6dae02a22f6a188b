"""Stages on hosts of several kinds: the DP against all cuts, submeshes and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, groupby, pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.schedules.planned import fill_share
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.placement import Group, orders, place_on_kinds, submeshes
from alpa.passes.solve.stages.problem import (
    FAR,
    NEAR,
    OTHER,
    NoCutError,
    Problem,
    Solution,
    Stage,
    verify,
)
from alpa.passes.solve.stages.stage_dp import solve, solve_below

Place = tuple[int, int, int]
"""A submesh, the number of its group, and the first of the group's devices that it has."""


def places(
    problem: Problem, count: int, at: tuple[int, int] = (0, 0), *, is_first: bool = True
) -> Iterator[list[Place]]:
    """All submeshes of so many stages, where they are: all devices of a host are used, or none.

    Args:
        at: the group, and the first of its devices that may be used.
    """
    number, start = at
    if number == len(problem.groups):
        if count == 0:
            yield []
        return
    group = problem.groups[number]
    if is_first:  # Groups may be left out before the first stage.
        yield from places(problem, count, (number + 1, 0), is_first=True)
    if count == 0:
        return
    # Hosts may stay idle before the first stage of a group.
    begins = range(0, group.num_devices, group.devices_per_host) if start == 0 else [start]
    for begin in begins:
        for m, (kind, size) in enumerate(zip(problem.kinds, problem.sizes, strict=True)):
            end = begin + size
            if kind == group.kind and end <= group.num_devices and problem.ways(group, begin, m):
                behind = (number + 1, 0) if end == group.num_devices else (number, end)
                for rest in places(problem, count - 1, behind, is_first=False):
                    yield [(m, number, begin), *rest]


def objective(problem: Problem, bounds: Sequence[tuple[int, int]], found: Sequence[Place]) -> float:
    """What is minimised; inf where it does not fit into memory."""
    a: list[float] = []
    updates: list[float] = []
    groups = [group for _, group, _ in found]
    for n, ((i, j), (m, group, begin)) in enumerate(zip(bounds, found, strict=True)):
        if problem.max_in_flight[i, j, m] < problem.in_flight(len(bounds) - n, len(bounds)):
            return inf
        each, end = problem.groups[group].devices_per_host, begin + problem.sizes[m]
        before = FAR if begin % each == 0 else NEAR
        behind = FAR if end % each == 0 else NEAR
        if groups[:n] and groups[n - 1] != group:
            before = OTHER
        if groups[n + 1 :] and groups[n + 1] != group:
            behind = OTHER
        a.append(problem.t[i, j, m] + problem.c[i, m, before] + problem.back[j, m, behind])
        updates.append(problem.u[i, j, m])
    if max(a) == inf or problem.minimise == "throughput":
        return max(a)
    fill = fill_share(problem.schedule, len(bounds), problem.num_micro_batches)
    return float(fill * sum(a) + (problem.num_micro_batches - fill) * max(a) + max(updates))


def brute_force(problem: Problem) -> float:
    best, layers = inf, problem.num_layers
    for count in range(1, layers + 1) if problem.num_stages is None else [problem.num_stages]:
        every = list(places(problem, count))
        for inner in combinations(range(1, layers), count - 1):
            bounds = [(a, b - 1) for a, b in pairwise((0, *inner, layers))]
            best = min([best, *(objective(problem, bounds, found) for found in every)])
    return best


KINDS = (
    [(2, 1), (1, 1)],
    [(1, 2), (1, 1)],
    [(1, 2), (2, 1)],
    [(1, 1), (1, 1), (1, 1)],
    [(2, 2), (1, 1)],
    [(1, 3), (2, 1)],
    [(1, 6), (1, 3)],
)
"""Hosts of one or two devices, or one host of a kind, so that no stage is moved."""


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kinds = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers = draw(st.integers(1, 4))
    found = [(kind, shape) for kind, it in enumerate(kinds) for shape in submeshes(*it)]
    size = (layers, layers, len(found))
    into, back = rng.random((2, layers, len(found), 3))
    into[0] = back[-1] = 0.0
    return Problem(
        groups=draw(st.sampled_from(list(orders(kinds)))),
        submeshes=tuple(shape for _, shape in found),
        kind_of=tuple(kind for kind, _ in found),
        t=np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), inf, rng.random(size)),
        u=rng.random(size),
        max_in_flight=rng.choice(draw(st.sampled_from([[10**6], [0, 1, 2, 10**6]])), size),
        c=into,
        back=back,
        num_micro_batches=draw(st.sampled_from([1, 4, 64])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"])),
        num_stages=draw(st.sampled_from([None, None, 2])),
        minimise=draw(st.sampled_from(["step", "step", "throughput"])),
    )


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(NoCutError):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(problem=problems(), share=st.sampled_from([0.5, 0.999, 1.0, 1.001, 2.0]))
def test_cuts_below_an_objective(problem: Problem, share: float) -> None:
    best = brute_force(problem)
    found = solve_below(problem, inf if best == inf else share * best)
    if best == inf or share < 1:
        assert found is None
    elif share > 1:
        assert found is not None
        assert found.objective == pytest.approx(best, rel=1e-9)


def cuts(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """All stages of all layers on submeshes, whatever hosts they need."""
    layers = problem.num_layers
    for count in range(1, layers + 1):
        for inner in combinations(range(1, layers), count - 1):
            for meshes in product(range(len(problem.sizes)), repeat=count):
                bounds = pairwise((0, *inner, layers))
                yield tuple(
                    Stage(first=a, last=b - 1, submesh=m)
                    for (a, b), m in zip(bounds, meshes, strict=True)
                )


def is_there(problem: Problem, kinds: Sequence[tuple[int, int]], stages: Sequence[Stage]) -> bool:
    """Whether there are whole hosts for each row of stages on one kind, and a plan in memory."""
    hosts = [count for count, _ in kinds]
    for kind, run in groupby(stages, key=lambda s: problem.kinds[s.submesh]):
        needed = sum(problem.sizes[s.submesh] for s in run) / kinds[kind][1]
        if needed != int(needed):
            return False
        hosts[kind] -= int(needed)
    return min(hosts) >= 0 and all(
        problem.max_in_flight[s.first, s.last, s.submesh]
        >= problem.in_flight(len(stages) - n, len(stages))
        and problem.t[s.first, s.last, s.submesh] < inf
        for n, s in enumerate(stages)
    )


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_all_orders_of_hosts_together_leave_nothing_out(problem: Problem) -> None:
    counts: dict[int, tuple[int, int]] = {}
    for kind, hosts, devices in problem.groups:
        counts[kind] = counts.get(kind, (0, 0))[0] + hosts, devices
    kinds = [counts[kind] for kind in sorted(counts)]
    problem = replace(problem, num_stages=None)
    possible = (stages for stages in cuts(problem) if is_there(problem, kinds, stages))
    best = min((problem.objective(stages) for stages in possible), default=inf)
    found = inf
    for groups in orders(kinds):
        with suppress(NoCutError):
            solution = solve(replace(problem, groups=groups))
            found = min(found, solution.objective)
            shapes = [problem.submeshes[s.submesh] for s in solution.stages]
            kind_of = [problem.kinds[s.submesh] for s in solution.stages]
            placed = [it for mesh in place_on_kinds(kinds, shapes, kind_of) for it in mesh]
            assert len({*placed}) == len(placed)
    assert found == pytest.approx(best, rel=1e-9)


def test_orders() -> None:
    a, b = Group(0, 1, 8), Group(1, 1, 4)
    assert list(orders([(1, 8), (1, 4)])) == [(a, b), (b, a)]
    assert len(list(orders([(2, 8), (2, 4)]))) == 6
    assert (a, b._replace(hosts=2), a) in [*orders([(2, 8), (2, 4)])]
    # More orders than are tried: hosts of a kind stay together.
    many = a._replace(hosts=9), b._replace(hosts=9)
    assert list(orders([(9, 8), (9, 4)])) == [many, many[::-1]]
    assert list(orders([(3, 4)])) == [(Group(0, 3, 4),)]


def test_places_on_kinds() -> None:
    placed = place_on_kinds([(2, 2), (2, 1)], [(1, 1), (1, 2), (1, 1)], [1, 0, 1])
    assert placed == [((2, 0),), ((0, 0), (0, 1)), ((3, 0),)]


def test_what_is_wrong() -> None:
    groups = Group(0, 1, 2), Group(1, 1, 1)
    flat = np.ones((2, 2, 3))
    problem = Problem(
        groups=groups,
        submeshes=((1, 1), (1, 2), (1, 1)),
        kind_of=(0, 0, 1),
        t=flat,
        u=flat,
        max_in_flight=9 * flat,
        c=np.zeros((2, 3, 3)),
        back=np.zeros((2, 3, 3)),
        num_micro_batches=1,
        schedule="1f1b",
    )
    with pytest.raises(ValueError, match="neighbouring groups must be of different kinds"):
        solve(replace(problem, groups=(groups[0], groups[0])))
    with pytest.raises(ValueError, match=r"c must have shape \(2, 3, 3\)"):
        solve(replace(problem, c=np.zeros((2, 3, 2))))
    messages = {(0, 2): "use 1 devices of kind 0, a part of a host", (2, 2): "use 2 devices, not"}
    for meshes, message in messages.items():
        stages = tuple(Stage(first=k, last=k, submesh=m) for k, m in enumerate(meshes))
        with pytest.raises(VerificationError, match=message):
            verify(problem, Solution(stages=stages, objective=3.0, evaluations=1))
