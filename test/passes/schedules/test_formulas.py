"""Makespans and peaks of the generators, with equal items, against published figures."""

from __future__ import annotations

from itertools import product

import pytest

from alpa.passes.schedules.measure import Costs, Measured, measure
from alpa.passes.schedules.named import NAMES, Name, schedule_of
from alpa.passes.schedules.verify import ScheduleError, verify

SIZES = [*product((2, 4, 8), (8, 16))]


def measured(name: Name, meshes: int, batches: int, chunks: int | None = None) -> Measured:
    """With F = I = W = 1 for each stage, so that a whole backward takes 2."""
    schedule = schedule_of(name, meshes, batches, chunks)
    verify(schedule)
    return measure(schedule, Costs.uniform(schedule.num_stages))


@pytest.mark.parametrize(("meshes", "batches"), SIZES)
def test_gpipe(meshes: int, batches: int) -> None:
    found = measured("gpipe", meshes, batches)
    assert found.seconds == 3 * (batches + meshes - 1)
    assert found.peak == (batches,) * meshes


@pytest.mark.parametrize(("meshes", "batches"), SIZES)
def test_1f1b(meshes: int, batches: int) -> None:
    found = measured("1f1b", meshes, batches)
    assert found.bubble == 3 * (meshes - 1)
    assert found.peak == tuple(min(batches, meshes - d) for d in range(meshes))


@pytest.mark.parametrize(("meshes", "batches"), SIZES)
def test_eager_1f1b(meshes: int, batches: int) -> None:
    found = measured("eager-1f1b", meshes, batches)
    assert found.bubble == 3 * (meshes - 1)
    assert found.peak == tuple(min(batches, 2 * (meshes - d) - 1) for d in range(meshes))


@pytest.mark.parametrize(("meshes", "batches"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaved_1f1b(meshes: int, batches: int, chunks: int) -> None:
    """The published bubble is (S - 1) (F + B) / v of a mesh's whole work, here 3 per chunk."""
    found = measured("interleaved-1f1b", meshes, batches, chunks)
    assert found.bubble == 3 * (meshes - 1)
    total = batches * chunks
    firsts = [2 * (meshes - d - 1) + (chunks - 1) * meshes + 1 for d in range(meshes)]
    assert found.peak == tuple(min(total, first) for first in firsts)


@pytest.mark.parametrize(("meshes", "batches"), SIZES)
def test_zb_h1(meshes: int, batches: int) -> None:
    found = measured("zb-h1", meshes, batches)
    assert found.bubble == meshes - 1
    assert found.peak == (min(batches, meshes),) * meshes


@pytest.mark.parametrize(
    ("forward", "backward_input", "backward_weight"), [(2, 2, 1), (3, 3, 2), (2, 3, 2)]
)
def test_zb_h1_of_other_costs(forward: int, backward_input: int, backward_weight: int) -> None:
    """The bubble is (S - 1) (F + I - W)."""
    schedule = schedule_of("zb-h1", 4, 16)
    costs = Costs.uniform(
        4, forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )
    assert measure(schedule, costs).bubble == 3 * (forward + backward_input - backward_weight)


@pytest.mark.parametrize(("meshes", "batches"), [it for it in SIZES if it[1] >= 2 * it[0] - 1])
def test_zb_v(meshes: int, batches: int) -> None:
    found = measured("zb-v", meshes, batches)
    assert found.bubble == meshes - 1
    assert max(found.peak) <= 2 * meshes


@pytest.mark.parametrize("meshes", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_v_schedules(name: Name, meshes: int) -> None:
    """Published: rates of S / 2B and 2S / 3B, with (S + 2) // 2 and (S + 4) // 3 micro-batches."""
    batches = 16
    found = measured(name, meshes, batches)
    rate = meshes / (2 * batches) if name == "v-half" else 2 * meshes / (3 * batches)
    most = (meshes + 2) // 2 if name == "v-half" else (meshes + 4) // 3
    assert found.bubble / (6 * batches) <= 1.1 * rate
    assert max(found.peak) <= 2 * most


def test_figures_of_torch() -> None:
    """torch 2.13's tables with mock stages: 4 meshes, 2 chunks, 8 micro-batches, unit costs."""
    interleaved = measured("interleaved-1f1b", 4, 8)
    assert interleaved.bubble == 9
    assert interleaved.peak == (11, 9, 7, 5)
    zb_v = measured("zb-v", 4, 8)
    assert (zb_v.bubble, max(zb_v.peak)) == (3, 8)
    assert max(measured("dualpipe-v", 4, 8).peak) == 9


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_run(name: Name) -> None:
    for meshes, batches in product(range(1, 7), (1, 2, 3, 5, 12, 13)):
        refused = (name == "interleaved-1f1b" and batches % meshes) or (
            name == "dualpipe-v" and batches < 2 * meshes
        )
        if refused:
            with pytest.raises(ScheduleError, match="micro-batches"):
                schedule_of(name, meshes, batches)
        else:
            verify(schedule_of(name, meshes, batches))


def test_numbers_that_a_schedule_does_not_admit() -> None:
    with pytest.raises(ScheduleError, match="6 is no multiple of that; take 8 micro-batches"):
        schedule_of("interleaved-1f1b", 4, 6)
    with pytest.raises(ScheduleError, match=r"dualpipe-v needs at least .* stages, 8"):
        schedule_of("dualpipe-v", 4, 7)
    with pytest.raises(ScheduleError, match="zb-v has 2 stages per mesh, not 3"):
        schedule_of("zb-v", 4, 8, chunks=3)
    with pytest.raises(ScheduleError, match="not 0 and 3"):
        schedule_of("1f1b", 0, 3)
