from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import NoCutError, Problem, Stage, verify
from alpa.passes.solve.stages.stage_dp import solve
from test.passes.solve.stages import test_stage_dp_equal_layers as equal_layers


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Each submesh twice, as two shapes or with two costs of one shape."""
    problem = draw(equal_layers.problems())
    each, count = draw(st.integers(1, 2)), len(problem.submeshes)
    hidden = arrays(float, (count, 2), elements=st.floats(0, 1))
    return replace(
        problem,
        equal_layers=False,
        equal_meshes=tuple(m // each for m in range(count)),
        hidden=draw(hidden) if draw(st.booleans()) else None,
        schedule=draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"])),
        minimise=draw(st.sampled_from(["step", "step", "throughput"])),
    )


def brute_force(problem: Problem) -> float:
    """The best objective of cuts on one mesh, as often as there are stages, in whole hosts."""
    (group,), numbers = problem.groups, problem.equal_meshes
    assert numbers is not None
    layers, best = problem.num_layers, inf
    for count in {problem.num_stages} if problem.num_stages else range(1, layers + 1):
        for meshes in product(range(len(problem.submeshes)), repeat=count):
            used = sum(problem.sizes[m] for m in meshes)
            is_whole = used <= problem.num_devices and used % group.devices_per_host == 0
            if len({numbers[m] for m in meshes}) > 1 or not is_whole:
                continue
            for cuts in combinations(range(1, layers), count - 1):
                bounds = zip((0, *cuts), (*cuts, layers), strict=True)
                stages = tuple(
                    Stage(first=a, last=b - 1, submesh=m)
                    for (a, b), m in zip(bounds, meshes, strict=True)
                )
                if all(
                    problem.max_in_flight[s.first, s.last, s.submesh]
                    >= problem.in_flight(count - n, count)
                    for n, s in enumerate(stages)
                ):
                    best = min(best, problem.objective(stages))
    return best


@settings(max_examples=150, deadline=None)
@given(problem=problems())
def test_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    if best == inf:
        with pytest.raises(NoCutError):
            solve(problem)
    else:
        assert solve(problem).objective == pytest.approx(best, rel=1e-9)


def one_host_each(hosts: int) -> Problem:
    """Two layers, each as slow on two hosts as on one."""
    shape = (2, 2, 2)
    return Problem(
        groups=(Group(0, hosts, 1),),
        submeshes=((1, 1), (2, 1)),
        t=np.array([[1.0, 2.0], [0.0, 1.0]])[:, :, None].repeat(2, axis=2),
        u=np.zeros(shape),
        max_in_flight=np.full(shape, 9),
        c=np.zeros((2, 2, 2)),
        back=np.zeros((2, 2, 2)),
        num_micro_batches=8,
        schedule="1f1b",
        equal_meshes=(0, 1),
    )


def test_hosts_stay_idle() -> None:
    problem = one_host_each(3)
    found = solve(problem)
    assert len(found.stages) == 2
    assert sum(problem.sizes[stage.submesh] for stage in found.stages) == 2
    of_any_size = solve(replace(problem, equal_meshes=None))
    assert sum(problem.sizes[stage.submesh] for stage in of_any_size.stages) == 3


def test_other_meshes_are_refused() -> None:
    problem = one_host_each(3)
    found = solve(problem)
    first, second = found.stages
    other = replace(found, stages=(first, replace(second, submesh=1 - first.submesh)))
    with pytest.raises(VerificationError, match="not on equal meshes"):
        verify(problem, other)


def test_part_of_a_host_is_no_idle_host() -> None:
    problem = replace(one_host_each(3), groups=(Group(0, 3, 2),), submeshes=((1, 1), (1, 2)))
    found = solve(problem)
    assert sum(problem.sizes[stage.submesh] for stage in found.stages) % 2 == 0


@pytest.mark.parametrize(
    "changes",
    [{"equal_layers": True}, {"groups": (Group(0, 2, 1), Group(1, 1, 1)), "kind_of": (0, 1)}],
)
def test_with_other_restrictions(changes: dict[str, object]) -> None:
    problem = one_host_each(3)
    if "groups" in changes:
        ends = np.zeros((2, 2, 3))
        problem = replace(problem, c=ends, back=ends)
    with pytest.raises(ValueError, match="restriction of their own"):
        solve(replace(problem, **changes))


def test_one_mesh_of_two_sizes() -> None:
    with pytest.raises(ValueError, match="the same mesh differ in size"):
        solve(replace(one_host_each(3), equal_meshes=(0, 0)))
