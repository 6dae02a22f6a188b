from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages import fixed_meshes, stage_dp
from alpa.passes.solve.stages.fixed_meshes import Mesh, Problem
from alpa.passes.solve.stages.stage_dp import NoCutError, NoCutInMemoryError, Stage


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layers, meshes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (layers, layers, 3)
    transfers = np.concatenate([np.zeros((1, 3, 2)), rng.random((layers - 1, 3, 2))])
    costs = stage_dp.Problem(
        hosts=1,
        devices_per_host=4,
        submeshes=((1, 1), (1, 2), (1, 2)),
        t=np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), inf, rng.random(size)),
        u=rng.random(size),
        max_in_flight=rng.choice(draw(st.sampled_from([[9], [0, 1, 2, 9]])), size),
        c=transfers,
        back=transfers[::-1],
        num_micro_batches=draw(st.sampled_from([1, 4])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        minimise=draw(st.sampled_from(["step", "throughput"])),
    )
    ways = st.sampled_from([(0,), (1, 2), (2,)])
    return Problem(
        costs=costs,
        meshes=tuple(
            Mesh(
                submeshes=draw(ways),
                before_is_far=draw(st.booleans()),
                behind_is_far=draw(st.booleans()),
            )
            for _ in range(meshes)
        ),
        moved=rng.integers(0, draw(st.sampled_from([1, 3])), (layers, layers, meshes)).astype(
            float
        ),
    )


def brute_force(problem: Problem) -> tuple[float, float]:
    """Bytes and objective of the best of all cuts."""
    layers, meshes = problem.costs.num_layers, len(problem.meshes)
    best = (inf, inf)
    for inner in combinations_with_replacement(range(layers + 1), meshes - 1):
        bounds = zip((0, *inner), (*inner, layers), strict=True)
        used = [(q, first, stop - 1) for q, (first, stop) in enumerate(bounds) if stop > first]
        for ways in product(*(problem.meshes[q].submeshes for q, _, _ in used)):
            stages = [
                (q, Stage(first=i, last=j, submesh=m))
                for (q, i, j), m in zip(used, ways, strict=True)
            ]
            a = [problem.a(stage, q) for q, stage in stages]
            moved = sum(float(problem.moved[s.first, s.last, q]) for q, s in stages)
            u = max(problem.u(stage) for _, stage in stages)
            if max(a) < inf:
                best = min(best, (moved, problem.objective(sum(a), max(a), u)))
    return best


@settings(max_examples=150, deadline=None)
@given(problems())
def test_it_is_the_best_of_all_cuts(problem: Problem) -> None:
    moved, objective = brute_force(problem)
    if moved == inf:
        with pytest.raises(NoCutError):
            fixed_meshes.solve(problem)
        return
    found = fixed_meshes.solve(problem)
    a = [problem.a(stage, q) for stage, q in zip(found.stages, found.meshes, strict=True)]
    u = [problem.u(stage) for stage in found.stages]
    assert found.moved == moved
    assert problem.objective(sum(a), max(a), max(u)) == pytest.approx(objective)


def two_layers() -> Problem:
    """On two equal meshes; the second layer is held on the first mesh, the first on the second."""
    costs = stage_dp.Problem(
        hosts=1,
        devices_per_host=2,
        submeshes=((1, 1),),
        t=np.ones((2, 2, 1)),
        u=np.zeros((2, 2, 1)),
        max_in_flight=np.full((2, 2, 1), 9),
        c=np.zeros((2, 1, 2)),
        num_micro_batches=1,
        schedule="gpipe",
    )
    mesh = Mesh(submeshes=(0,), before_is_far=False, behind_is_far=False)
    moved = np.zeros((2, 2, 2))
    moved[0, :, 0] = 8
    moved[:, 1, 1] = 2
    return Problem(costs=costs, meshes=(mesh, mesh), moved=moved)


def test_the_fewest_bytes_are_moved() -> None:
    found = fixed_meshes.solve(two_layers())
    assert (found.meshes, found.moved) == ((1,), 2)


def test_what_does_not_fit_is_told() -> None:
    problem = two_layers()
    full = replace(problem.costs, max_in_flight=np.zeros((2, 2, 1), int))
    with pytest.raises(NoCutInMemoryError, match="no cut of 2 layers for the 2 given meshes fits"):
        fixed_meshes.solve(replace(problem, costs=full))
    never = replace(problem.costs, t=np.full((2, 2, 1), inf))
    with pytest.raises(NoCutError, match="a layer has no plan on any of them"):
        fixed_meshes.solve(replace(problem, costs=never))
    with pytest.raises(ValueError, match=r"moved must have shape \(2, 2, 2\)"):
        fixed_meshes.solve(replace(problem, moved=np.zeros((2, 2, 1))))


def test_wrong_solutions_are_found_out() -> None:
    problem = two_layers()
    found = fixed_meshes.solve(problem)
    for changed, message in (
        ({"step_seconds": 2.0}, "the stages take 1.0 s, not 2.0 s"),
        ({"moved": 0.0}, "the stages move 2.0 bytes, not 0.0"),
        ({"meshes": (0,)}, "the stages move 8.0 bytes"),
        ({"stages": (Stage(first=0, last=0, submesh=0),)}, "are no cut of 2 layers"),
    ):
        with pytest.raises(VerificationError, match=message):
            fixed_meshes.verify(problem, replace(found, **changed))
