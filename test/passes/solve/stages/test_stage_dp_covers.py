"""Stages on submeshes in any order: the DP against all covers of a cluster and all placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import Group, place, submeshes
from alpa.passes.solve.stages.problem import NoCutError, Problem, Stage
from alpa.passes.solve.stages.stage_dp import solve

Hosts = tuple[int, ...]
"""On which host the submesh of each stage is; -1 for several hosts, which no neighbour shares."""


def cuts(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """All stages of all layers on submeshes that have as many devices as the cluster."""
    layers, sizes = problem.num_layers, problem.sizes
    for count in range(1, layers + 1):
        for inner in combinations(range(1, layers), count - 1):
            bounds = list(pairwise((0, *inner, layers)))
            for meshes in product(range(len(sizes)), repeat=count):
                if sum(sizes[m] for m in meshes) == problem.num_devices:
                    yield tuple(
                        Stage(first=a, last=b - 1, submesh=m)
                        for (a, b), m in zip(bounds, meshes, strict=True)
                    )


def placements(problem: Problem, stages: Sequence[Stage]) -> Iterator[Hosts]:
    """All ways to fill hosts exactly with the submeshes that are smaller than a host."""
    each = problem.groups[0].devices_per_host
    small = [problem.sizes[s.submesh] for s in stages if problem.sizes[s.submesh] < each]
    hosts = range(sum(small) // each)
    for chosen in product(hosts, repeat=len(small)):
        filled = np.bincount(chosen, small, minlength=len(hosts))
        if (filled == each).all():
            left = iter(chosen)
            yield tuple(next(left) if problem.sizes[s.submesh] < each else -1 for s in stages)


def step_seconds(problem: Problem, stages: Sequence[Stage], hosts: Hosts) -> float:
    """T, from where the stages lie."""
    far = [True, *(a != b or a < 0 for a, b in pairwise(hosts)), True]
    a = [
        problem.t[s.first, s.last, s.submesh]
        + problem.c[s.first, s.submesh, int(far[n])]
        + problem.back[s.last, s.submesh, int(far[n + 1])]
        for n, s in enumerate(stages)
    ]
    update = max(problem.u[s.first, s.last, s.submesh] for s in stages)
    return float(sum(a) + (problem.num_micro_batches - 1) * max(a) + update)


def fits(problem: Problem, stages: Sequence[Stage]) -> bool:
    return all(
        problem.max_in_flight[s.first, s.last, s.submesh] >= problem.in_flight(len(stages) - n)
        for n, s in enumerate(stages)
    )


def brute_force(problem: Problem) -> float:
    return min(
        (
            step_seconds(problem, stages, hosts)
            for stages in cuts(problem)
            if fits(problem, stages)
            for hosts in placements(problem, stages)
        ),
        default=inf,
    )


def random_problem(seed: int, *, far: float) -> Problem:
    """Independent costs; a transfer between hosts takes `far` times one inside a host."""
    rng = np.random.default_rng(seed)
    hosts, devices = [(2, 2), (3, 2), (2, 4), (1, 6), (3, 3), (2, 6), (1, 7)][seed % 7]
    layers, shapes = int(rng.integers(2, 6)), submeshes(hosts, devices)
    size = (layers, layers, len(shapes))
    near = rng.random((2, layers, len(shapes)))
    near[0, 0] = near[1, -1] = 0.0
    into, back = np.stack([near, far * near], axis=3)
    return Problem(
        groups=(Group(0, hosts, devices),),
        submeshes=shapes,
        t=rng.random(size),
        u=rng.random(size),
        max_in_flight=rng.choice([0, 2, 3, 10**6], size),
        c=into,
        back=back,
        num_micro_batches=int(rng.choice([1, 4, 64])),
        schedule="1f1b",
    )


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_cover_that_a_placement_allows_is_left_out(seed: int) -> None:
    problem = random_problem(seed, far=1.0)
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(NoCutError):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_placement_takes_no_longer_than_the_estimate(seed: int) -> None:
    """Where stages are moved, transfers are estimated as those between hosts, which are slower."""
    problem = random_problem(seed, far=3.0)
    best = brute_force(problem)
    if best == inf:
        return
    solution = solve(problem)
    assert solution.objective >= best * (1 - 1e-9)
    shapes = [problem.submeshes[s.submesh] for s in solution.stages]
    placed = place(*problem.groups[0][1:], shapes)
    hosts = tuple(
        mesh[0][0] if n * m < problem.groups[0].devices_per_host else -1
        for (n, m), mesh in zip(shapes, placed, strict=True)
    )
    seconds = step_seconds(problem, solution.stages, hosts)
    assert best * (1 - 1e-9) <= seconds <= solution.objective * (1 + 1e-9)


def test_a_large_stage_between_two_small_ones() -> None:
    """On 2x2 devices the two small stages share a host, as if they were neighbours on none."""
    problem = random_problem(0, far=1.0)
    even = np.full((3, 3, 3), inf)
    even[range(3), range(3)] = [[1.0, inf, inf], [2.0, 1.0, inf], [1.0, inf, inf]]
    near = np.zeros((3, 3, 2))
    near[1:] = [0.25, 0.5]
    problem = replace(
        problem,
        t=even,
        u=np.zeros_like(even),
        max_in_flight=np.full(even.shape, 10**6),
        c=near,
        back=np.zeros_like(near),
        num_micro_batches=1,
    )
    solution = solve(problem)
    assert [problem.submeshes[s.submesh] for s in solution.stages] == [(1, 1), (1, 2), (1, 1)]
    assert solution.objective == 3.0 + 2 * 0.5
    placed = place(2, 2, [(1, 1), (1, 2), (1, 1)])
    assert placed == [((1, 0),), ((0, 0), (0, 1)), ((1, 1),)]
