"""Layers that move from the busiest mesh to others."""

from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.schedules.planned import lists_of
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import Problem, Stage
from alpa.passes.stages.balance import Balance, Stages
from alpa.passes.stages.intervals import intervals

LAYERS, MESHES = 12, 2
FAST, SMALL = 0, 1


def problem(seconds: np.ndarray) -> Problem:
    """Two kinds of costs: the second takes a third longer."""
    each = intervals(seconds)
    times = np.stack([each, 4 / 3 * each], axis=2)
    nothing = np.zeros((LAYERS, 2, 2))
    return Problem(
        groups=(Group(0, 2 * MESHES, 1),),
        submeshes=((1, 1), (1, 1)),
        t=times,
        u=np.zeros_like(times),
        max_in_flight=np.full(times.shape, 8),
        c=nothing,
        back=nothing,
        num_micro_batches=8,
        schedule="zb-v",
        num_stages=2 * MESHES,
    )


def stages(*sizes: int, submesh: int = FAST) -> Stages:
    ends = np.cumsum(sizes).tolist()
    return tuple(
        Stage(first=end - size, last=end - 1, submesh=submesh)
        for end, size in zip(ends, sizes, strict=True)
    )


def balance(seconds: np.ndarray, most: dict[int, float] | None = None) -> Balance:
    """`most`: layers that fit on a mesh; a small layer counts half."""

    def fits(mesh: int, its: Stages) -> bool:
        mine = (its[n] for n, number in lists.mesh_of.items() if number == mesh)
        size = sum((s.last - s.first + 1) * (1 if s.submesh == FAST else 0.5) for s in mine)
        return most is None or size <= most[mesh]

    lists = lists_of("zb-v", 2 * MESHES, 8)
    return Balance(schedule=lists, problem=problem(seconds), usable=(FAST, SMALL), fits=fits)


def layers(its: Stages) -> list[int]:
    return [s.last - s.first + 1 for s in its]


def busy(found: Balance, its: Stages) -> list[float]:
    seconds = found.problem.a(its)
    return [sum(seconds[n] for n, m in found.schedule.mesh_of.items() if m == q) for q in (0, 1)]


def test_meshes_become_equally_busy() -> None:
    found = balance(np.ones(LAYERS))
    *_, last = found.cuts(stages(1, 5, 5, 1))
    assert busy(found, last) == [6.0, 6.0]
    assert sum(layers(last)) == LAYERS
    assert [s.first for s in last][1:] == [s.last + 1 for s in last][:-1]


def test_each_cut_is_better_on_the_busiest_mesh() -> None:
    found = balance(np.arange(1.0, LAYERS + 1))
    cuts = [stages(1, 5, 5, 1), *found.cuts(stages(1, 5, 5, 1))]
    longest = [max(busy(found, its)) for its in cuts]
    assert longest == sorted(longest, reverse=True)
    assert longest[-1] < longest[0]


def test_a_stage_takes_more_memory_where_its_mesh_has_some() -> None:
    """Both stages of a mesh are small, though one of them may be fast."""
    found = balance(np.ones(LAYERS), {0: 4.5, 1: 4.5})
    *_, last = found.cuts(stages(3, 3, 3, 3, submesh=SMALL))
    assert {layers(last)[n] for n in range(4)} == {3}
    for mesh in (0, 1):
        mine = [last[n].submesh for n, m in found.schedule.mesh_of.items() if m == mesh]
        assert sorted(mine) == [FAST, SMALL]


@pytest.mark.parametrize("most", [{0: 6.0, 1: 6.0}, {0: 3.0, 1: 3.0}])
def test_what_is_balanced_or_full_stays(most: dict[int, float]) -> None:
    submesh = FAST if most[0] == 6.0 else SMALL
    assert [*balance(np.ones(LAYERS), most).cuts(stages(3, 3, 3, 3, submesh=submesh))] == []
