from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import (
    Given,
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Stage,
    verify,
)
from alpa.passes.solve.stages.stage_dp import solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    layers, meshes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    # One mesh may be used in several ways, in any order, and another one not at all.
    mesh_of = tuple(draw(st.lists(st.integers(0, meshes - 1), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = (layers, layers, len(mesh_of))
    transfers = np.zeros((layers, len(mesh_of), 2))
    transfers[1:] = rng.random((layers - 1, len(mesh_of), 2))
    return Problem(
        groups=(Group(0, 1, 4),),
        submeshes=tuple((1, draw(st.sampled_from([1, 2]))) for _ in mesh_of),
        t=np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.3])), inf, rng.random(size)),
        u=rng.random(size),
        max_in_flight=rng.choice(draw(st.sampled_from([[9], [0, 1, 2, 9]])), size),
        c=transfers,
        back=transfers[::-1],
        num_micro_batches=draw(st.sampled_from([1, 4])),
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "zb-h1"])),
        minimise=draw(st.sampled_from(["step", "throughput"])),
        given=Given(
            mesh_of=mesh_of,
            far=tuple((draw(st.booleans()), draw(st.booleans())) for _ in range(meshes)),
            moved=rng.integers(0, draw(st.sampled_from([1, 3])), (layers, layers, meshes)).astype(
                float
            ),
        ),
    )


def given_of(problem: Problem) -> Given:
    assert problem.given is not None
    return problem.given


def brute_force(problem: Problem) -> tuple[float, float]:
    """Bytes and objective of the best of all cuts."""
    layers, given = problem.num_layers, given_of(problem)
    meshes = len(given.far)
    best = (inf, inf)
    for inner in combinations_with_replacement(range(layers + 1), meshes - 1):
        bounds = zip((0, *inner), (*inner, layers), strict=True)
        used = [(q, first, stop - 1) for q, (first, stop) in enumerate(bounds) if stop > first]
        ways = [[m for m, mesh in enumerate(given.mesh_of) if mesh == q] for q, _, _ in used]
        for submeshes in product(*ways):
            stages = tuple(
                Stage(first=i, last=j, submesh=m)
                for (_, i, j), m in zip(used, submeshes, strict=True)
            )
            fits = all(
                problem.max_in_flight[s.first, s.last, s.submesh] >= problem.in_flight(meshes - q)
                for (q, _, _), s in zip(used, stages, strict=True)
            )
            seconds = [
                problem.t[s.first, s.last, s.submesh]
                + problem.c[s.first, s.submesh, int(given.far[q][0])]
                + problem.back[s.last, s.submesh, int(given.far[q][1])]
                for (q, _, _), s in zip(used, stages, strict=True)
            ]
            assert problem.a(stages) == pytest.approx(seconds)
            if fits and max(seconds) < inf:
                moved = sum(float(given.moved[i, j, q]) for q, i, j in used)
                best = min(best, (moved, problem.objective(stages)))
    return best


@settings(max_examples=300, deadline=None)
@given(problems())
def test_it_is_the_best_of_all_cuts(problem: Problem) -> None:
    moved, objective = brute_force(problem)
    if moved == inf:
        with pytest.raises(NoCutError):
            solve(problem)
        return
    found = solve(problem)
    assert found.moved == moved
    assert problem.objective(found.stages) == pytest.approx(objective)


def two_layers() -> Problem:
    """On two equal meshes; the second layer is held on the first mesh, the first on the second."""
    moved = np.zeros((2, 2, 2))
    moved[0, :, 0] = 8
    moved[:, 1, 1] = 2
    return Problem(
        groups=(Group(0, 1, 2),),
        submeshes=((1, 1), (1, 1)),
        t=np.ones((2, 2, 2)),
        u=np.zeros((2, 2, 2)),
        max_in_flight=np.full((2, 2, 2), 9),
        c=np.zeros((2, 2, 2)),
        back=np.zeros((2, 2, 2)),
        num_micro_batches=1,
        schedule="gpipe",
        given=Given(mesh_of=(0, 1), far=((False, False),) * 2, moved=moved),
    )


def test_the_fewest_bytes_are_moved() -> None:
    found = solve(two_layers())
    assert found.stages == (Stage(first=0, last=1, submesh=1),)
    assert found.moved == 2


def test_an_error_says_what_does_not_fit() -> None:
    problem = two_layers()
    with pytest.raises(NoCutInMemoryError, match="no cut of 2 layers for the 2 given meshes fits"):
        solve(replace(problem, max_in_flight=np.zeros((2, 2, 2), int)))
    with pytest.raises(NoCutError, match="a layer has no plan on any of them"):
        solve(replace(problem, t=np.full((2, 2, 2), inf)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moved": np.zeros((2, 2, 1))}, r"moved must have shape \(2, 2, 2\), not \(2, 2, 1\)"),
        ({"moved": np.full((2, 2, 2), -1.0)}, "moved must not be negative"),
        ({"mesh_of": (0, 2)}, "mesh_of must give each of 2 submeshes one of the 2 meshes"),
        ({"mesh_of": (0,)}, "mesh_of must give each of 2 submeshes one of the 2 meshes"),
    ],
)
def test_check(changes, message) -> None:
    problem = two_layers()
    with pytest.raises(ValueError, match=message):
        solve(replace(problem, given=replace(given_of(problem), **changes)))


@pytest.mark.parametrize("changes", [{"num_stages": 1}, {"equal_layers": True}])
def test_given_meshes_leave_nothing_else_open(changes) -> None:
    with pytest.raises(ValueError, match="neither num_stages nor equal_layers"):
        solve(replace(two_layers(), **changes))


def test_wrong_solutions_are_found_out() -> None:
    problem = two_layers()
    found = solve(problem)
    first, second = (Stage(first=k, last=k, submesh=1 - k) for k in range(2))
    for changed, message in (
        ({"objective": 2.0}, "the stages take 1.0 s, not 2.0 s"),
        ({"moved": 0.0}, "the stages move 2.0 bytes, not 0.0"),
        ({"stages": (Stage(first=0, last=1, submesh=0),)}, "the stages move 8.0 bytes"),
        ({"stages": (first,)}, "are no cut of 2 layers"),
        ({"stages": (first, second)}, r"meshes \[1, 0\] are not in their order"),
    ):
        with pytest.raises(VerificationError, match=message):
            verify(problem, replace(found, **changed))
