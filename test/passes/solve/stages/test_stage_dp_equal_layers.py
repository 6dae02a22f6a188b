from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import Group, submeshes
from alpa.passes.solve.stages.problem import NoCutError, Problem, Stage
from alpa.passes.solve.stages.stage_dp import solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    hosts, devices = draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (3, 2), (2, 3)]))
    layers = draw(st.integers(1, 6))
    # Two views of each submesh.
    shapes = tuple(shape for shape in submeshes(hosts, devices) for _ in range(2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (layers, layers, len(shapes))
    return Problem(
        groups=(Group(0, hosts, devices),),
        submeshes=shapes,
        t=np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), inf, rng.random(size)),
        u=rng.random(size),
        max_in_flight=rng.choice(draw(st.sampled_from([[9], [0, 1, 2, 9]])), size),
        c=np.concatenate([np.zeros((1, len(shapes), 2)), rng.random((layers - 1, len(shapes), 2))]),
        back=np.concatenate(
            [rng.random((layers - 1, len(shapes), 2)), np.zeros((1, len(shapes), 2))]
        ),
        num_micro_batches=draw(st.sampled_from([1, 4])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        num_stages=draw(st.sampled_from([None, None, 2])),
        equal_layers=True,
    )


def brute_force(problem: Problem) -> float:
    """T of the best cut whose numbers of layers differ by at most one, on submeshes of one size."""
    layers, best = problem.num_layers, inf
    for count in {problem.num_stages} if problem.num_stages else range(1, layers + 1):
        for cuts in combinations(range(1, layers), count - 1):
            bounds = list(zip((0, *cuts), (*cuts, layers), strict=True))
            lengths = [stop - start for start, stop in bounds]
            if max(lengths) - min(lengths) > 1:
                continue
            for meshes in product(range(len(problem.submeshes)), repeat=count):
                used = [problem.submeshes[m] for m in meshes]
                if len(set(used)) > 1:
                    continue
                if count * used[0][0] * used[0][1] != problem.num_devices:
                    continue
                stages = tuple(
                    Stage(first=a, last=b - 1, submesh=m)
                    for (a, b), m in zip(bounds, meshes, strict=True)
                )
                if all(
                    problem.max_in_flight[s.first, s.last, s.submesh]
                    >= problem.in_flight(count - n)
                    for n, s in enumerate(stages)
                ):
                    best = min(best, problem.objective(stages))
    return best


@settings(max_examples=100)
@given(problem=problems())
def test_equals_brute_force(problem):
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(NoCutError, match="stages of equally many layers: "):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(best, rel=1e-9)


def test_a_better_cut_that_is_uneven_is_not_taken():
    """The first of four layers takes as long as the other three."""
    seconds = np.array([3.0, 1.0, 1.0, 1.0])
    times = np.array([[seconds[i : j + 1].sum() for j in range(4)] for i in range(4)])[:, :, None]
    problem = Problem(
        groups=(Group(0, 1, 2),),
        submeshes=((1, 1),),
        t=times,
        u=np.zeros_like(times),
        max_in_flight=np.full(times.shape, 9),
        c=np.zeros((4, 1, 2)),
        back=np.zeros((4, 1, 2)),
        num_micro_batches=8,
        schedule="1f1b",
    )
    assert [s.first for s in solve(problem).stages] == [0, 1]
    assert [s.first for s in solve(replace(problem, equal_layers=True)).stages] == [0, 2]
