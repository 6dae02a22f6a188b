from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa.passes.solve.stages.placement import Group, submeshes
from alpa.passes.solve.stages.problem import Problem
from alpa.passes.solve.stages.stage_dp import least_steps, solve
from alpa.passes.solve.stages.stage_table import Table
from alpa.passes.solve.stages.step_bounds import StepBounds
from test.passes.solve.stages.test_stage_dp import allowed_cuts, fitting_cuts, problems


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_no_cut_takes_less(problem: Problem) -> None:
    possible = (problem.t < inf) & np.triu(np.ones(problem.t.shape[:2], bool))[:, :, None]
    i, j, m = np.nonzero(possible)
    t, sizes = problem.t[i, j, m], np.array(problem.sizes)[m]
    bounds = StepBounds(problem, problem.num_devices)
    found = bounds.of(i, j, sizes, t[:, None], t[:, None], problem.u[i, j, m])
    least = dict(zip(zip(i, j, m, strict=True), found[:, 0], strict=True))
    for cut in allowed_cuts(problem):
        stages = [(s.first, s.last, s.submesh) for s in cut]
        if all(possible[stage] for stage in stages):
            step = problem.step_seconds(cut)
            assert max(least[stage] for stage in stages) <= step * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), enough=st.sampled_from([1.1, 1.5, inf]))
def test_no_cut_with_a_submesh_takes_less(problem: Problem, enough: float) -> None:
    cuts = {cut: problem.step_seconds(cut) for cut in fitting_cuts(problem)}
    within = enough * min(cuts.values(), default=1.0)
    for cut, step in cuts.items():
        least = least_steps(problem, len(cut), within)
        for stage in cut:
            assert least[stage.submesh] <= step * (1 + 1e-9) or step >= within * (1 - 1e-9)
        assert (least[least < inf] < within).all()


def test_slow_stages_are_left_out() -> None:
    """Two equal layers on two devices: both on one device take 4 s twice, and of more than one
    stage, each device may take 2 s for one layer."""
    problem = Problem(
        groups=(Group(0, 1, 2),),
        submeshes=((1, 1), (1, 2)),
        t=np.array([[[2.0, 1.0], [4.0, 2.0]], [[inf, inf], [2.0, 1.0]]]),
        u=np.zeros((2, 2, 2)),
        max_in_flight=np.full((2, 2, 2), 10**6),
        c=np.zeros((2, 2, 2)),
        back=np.zeros((2, 2, 2)),
        num_micro_batches=10,
        schedule="1f1b",
    )
    i, j, m = np.array([0, 0, 0]), np.array([0, 1, 1]), np.array([0, 0, 1])
    i, j, m = np.append(i, [1]), np.append(j, [1]), np.append(m, [0])
    t = problem.t[i, j, m][:, None]
    found = StepBounds(problem, 2).of(i, j, np.array([1, 1, 2, 1]), t, t, np.zeros(4))
    # The sum is 2 s with the other layer's 2 s, or those of a whole stage; the slowest takes 2 s.
    assert found[:, 0] == pytest.approx([4 + 9 * 2, 4 + 9 * 4, 2 + 9 * 2, 4 + 9 * 2])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_left_out_is_in_no_best_cut(schedule: str, seed: int) -> None:
    """As good as the best of all bounds b and u, by a table of all stages (eq. 4)."""
    layers, shapes, rng = 10, submeshes(2, 2), np.random.default_rng(seed)
    size = (layers, layers, len(shapes))
    length = np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1.0
    sizes = np.array([n * m for n, m in shapes])
    times = np.where(length > 0, length, inf)[:, :, None] / sizes * (1 + rng.random(size))
    ends = rng.random((layers, len(shapes), 2))
    problem = Problem(
        groups=(Group(0, 2, 2),),
        submeshes=shapes,
        t=times,
        u=rng.random(size) * 9,
        max_in_flight=rng.integers(1, 9, size),
        c=np.concatenate([np.zeros((1, len(shapes), 2)), ends[1:]]),
        back=np.concatenate([ends[1:], np.zeros((1, len(shapes), 2))]),
        num_micro_batches=8,
        schedule=schedule,
        num_stages=3,
    )
    table = Table(problem)
    b_values = np.quantile(table.b_values, np.linspace(0, 1, 40), method="higher")
    cuts = {table.cut(float(b), float(u)) for b in b_values for u in table.u_values[::7]}
    best = min(problem.objective(cut) for cut in cuts if cut is not None)
    assert solve(problem).objective <= best * (1 + 1e-12)
    free = solve(replace(problem, num_stages=None))
    assert free.objective <= best * (1 + 1e-12)
