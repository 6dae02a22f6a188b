"""What meshes hold under schedules with backwards in two parts, by their lists."""

from __future__ import annotations

import numpy as np
import pytest

from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.planned import chunks_of, lists_of
from alpa.passes.schedules.split_memory import (
    Bytes,
    Count,
    counts_of_stages,
    fullest,
    held_at,
    moments,
)

SCHEDULES = ("zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v")


def test_zb_h1_holds_many_before_the_first_part_or_many_behind_it() -> None:
    """Of four meshes, the last one runs first parts at once and leaves the second ones."""
    assert moments("zb-h1", 4, 8, 3) == ({3: Count(freed=1, read=4, made=4)},)
    assert {3: Count(freed=1, read=4, made=4)} not in moments("zb-h1", 4, 8, 1)
    assert max(it[1].freed for it in moments("zb-h1", 4, 8, 1)) == 3


def test_the_first_stage_frees_nothing_early_and_keeps_nothing_more() -> None:
    for schedule in SCHEDULES:
        for moment in moments(schedule, 8, 8, 0):
            assert moment[0].freed == moment[0].read
            assert moment[0].made == 0


def test_a_whole_backward_makes_what_its_second_part_reads() -> None:
    """DualPipeV leaves no weight gradients for later on the first mesh, but runs both parts."""
    lists = lists_of("dualpipe-v", 8, 8)
    assert any(work.kind == "backward" for work in lists.lists[0])
    assert max(moment[7].made for moment in moments("dualpipe-v", 8, 8, 0)) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_moment_is_that_of_the_lists(schedule: str) -> None:
    """If a first part frees nothing and makes nothing, `measure` says what is held."""
    lists = lists_of(schedule, 8, 8)
    peaks = measure(lists, Costs.uniform(8)).peak
    for mesh, peak in enumerate(peaks):
        each = {s: Bytes(freed=0.0, read=1.0, made=0.0) for s, m in lists.mesh_of.items()}
        assert held_at(fullest(schedule, 8, 8, mesh, each), each) == peak


def test_which_moment_is_fullest_depends_on_what_is_large() -> None:
    """ZB-V on the last of four meshes: before the first parts, or between the parts."""
    early = dict.fromkeys(range(8), Bytes(freed=1.0, read=0.0, made=0.0))
    late = dict.fromkeys(range(8), Bytes(freed=0.0, read=0.0, made=1.0))
    of_early, of_late = (fullest("zb-v", 8, 8, 3, its) for its in (early, late))
    assert (held_at(of_early, early), held_at(of_late, late)) == (8, 8)
    assert held_at(of_late, early) < 8
    assert held_at(of_early, late) < 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_has_its_share_of_its_mesh(schedule: str) -> None:
    """Equal stages hold on no mesh more than their shares together."""
    ((_, counts),) = counts_of_stages(schedule, 8, (8,))
    each = Bytes(freed=2.0, read=1.0, made=3.0)
    share = max(float(each.held(count)) for count in counts)
    chunks = chunks_of(schedule)
    found = [
        held_at(
            fullest(schedule, 8, 8, mesh, dict.fromkeys(range(1, 8), each)),
            dict.fromkeys(range(1, 8), each),
        )
        for mesh in range(8 // chunks)
    ]
    assert max(found) <= chunks * share


def test_bytes_of_one_stage_are_taken_from_arrays() -> None:
    arrays = Bytes(freed=np.ones((2, 2)), read=np.zeros((2, 2)), made=np.array([[1, 2], [3, 4]]))
    assert arrays.at(1, 0) == Bytes(freed=1.0, read=0.0, made=3.0)
    assert arrays.at(0, 1).held(Count(freed=2, read=5, made=1)) == 4.0
