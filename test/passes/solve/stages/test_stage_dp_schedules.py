"""The cuts that the DP finds for a schedule, against the simulated steps of all cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import inf

import numpy as np
import pytest

from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.planned import chunks_of, lists_of
from alpa.passes.solve.stages.placement import Group, submeshes
from alpa.passes.solve.stages.problem import Problem, Stage
from alpa.passes.solve.stages.stage_dp import solve

LAYERS, DEVICES = 5, 4


def simulated(problem: Problem, stages: Sequence[Stage]) -> float:
    """Seconds of a step; a third of a stage's seconds is its forward, half of its transfers come
    from either side."""
    stages = tuple(stages)
    t = [float(problem.t[s.first, s.last, s.submesh]) for s in stages]
    moved = [a - own for a, own in zip(problem.a(stages), t, strict=True)]
    third, nothing = tuple(own / 3 for own in t), (0.0,) * len(t)
    sides = [(i > 0, i < len(t) - 1) for i in range(len(t))]
    costs = Costs(
        forward=third,
        backward_input=third,
        backward_weight=third,
        forward_transfer=tuple(
            c * a / max(1, a + b) for c, (a, b) in zip(moved, sides, strict=True)
        ),
        backward_transfer=tuple(
            c * b / max(1, a + b) for c, (a, b) in zip(moved, sides, strict=True)
        ),
        update=tuple(float(problem.u[s.first, s.last, s.submesh]) for s in stages),
        held=nothing,
        kept=nothing,
        hidden=nothing,
    )
    return measure(lists_of(problem.schedule, len(t), problem.num_micro_batches), costs).seconds


def all_cuts(problem: Problem) -> list[list[Stage]]:
    """Stages of all layers on all devices of one host."""
    sizes, found = problem.sizes, list[list[Stage]]()

    def add(first: int, devices: int, before: list[Stage]) -> None:
        if first == problem.num_layers and not devices:
            found.append(before)
        for last in range(first, problem.num_layers):
            for m, size in enumerate(sizes):
                if size <= devices:
                    add(
                        last + 1,
                        devices - size,
                        [*before, Stage(first=first, last=last, submesh=m)],
                    )

    if problem.num_stages is None:
        add(0, problem.num_devices, [])
        return found
    for inner in combinations(range(1, problem.num_layers), problem.num_stages - 1):
        bounds = zip((0, *inner), (*inner, problem.num_layers), strict=True)
        found.append([Stage(first=a, last=b - 1, submesh=0) for a, b in bounds])
    return found


def random_problem(rng: np.random.Generator, schedule: str, batches: int) -> Problem:
    """Unequal layers, which larger meshes compute less efficiently."""
    chunks = chunks_of(schedule)
    shapes = submeshes(1, DEVICES) if chunks == 1 else ((1, 1),)
    sizes = np.array([n * m for n, m in shapes])
    ends = np.append(0.0, np.cumsum(rng.uniform(0.5, 1.5, LAYERS)))
    t = (ends[None, 1:] - ends[:-1, None])[:, :, None] / sizes
    t = t / np.where(sizes > 1, rng.uniform(0.6, 1.0, len(sizes)), 1.0)
    t[np.tril_indices(LAYERS, -1)] = inf
    into, back = rng.uniform(0.0, 0.1, (2, LAYERS, len(sizes), 2))
    into[0] = back[-1] = 0.0
    return Problem(
        groups=(Group(0, 1, DEVICES) if chunks == 1 else Group(0, DEVICES, 1),),
        submeshes=shapes,
        t=t,
        u=np.where(t < inf, t / 10, 0.0),
        max_in_flight=np.full(t.shape, 10**6),
        c=into,
        back=back,
        num_micro_batches=batches,
        schedule=schedule,
        num_stages=None if chunks == 1 else DEVICES,
    )


@pytest.mark.parametrize("batches", [4, 8])
@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("1f1b", 1.0),
        ("zb-h1", 1.0),
        ("eager-1f1b", 1.06),
        # Which two of these uneven stages share a mesh matters, and T does not know.
        ("interleaved-1f1b", 1.11),
        ("zb-v", 1.11),
        ("v-half", 1.11),
        ("v-min", 1.11),
        ("dualpipe-v", 1.11),
    ],
)
def test_the_best_cut_that_is_found_is_nearly_the_best_of_all(
    schedule: str, most: float, batches: int
) -> None:
    rng = np.random.default_rng(0)
    ratios: list[float] = []
    for _ in range(8):
        problem = random_problem(rng, schedule, batches)
        solution = solve(problem)
        found = min(simulated(problem, cut) for cut in (solution.stages, *solution.others))
        ratios.append(found / min(simulated(problem, cut) for cut in all_cuts(problem)))
        if chunks_of(schedule) > 1:
            assert problem.even_seconds <= found
    assert min(ratios) == 1
    assert max(ratios) <= most
    assert sum(ratios) / len(ratios) < 1.025
