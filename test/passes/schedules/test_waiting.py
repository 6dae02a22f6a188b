"""Versions that exist at once, by the lists of a schedule."""

from __future__ import annotations

import pytest

from alpa.passes.schedules.planned import in_flight
from alpa.passes.schedules.waiting import versions


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "eager-1f1b"])
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_keeps_its_activations_for_its_micro_batches_in_flight(
    schedule: str, stage: int
) -> None:
    kept = versions(schedule, 4, 8, (stage, "forward"), frozenset({(stage, "backward")}))
    assert kept == in_flight(schedule, 8, 4 - stage, 4)


def test_stages_of_one_mesh_keep_no_more_than_the_mesh() -> None:
    # Of 4 meshes ZB-V keeps 8 activations on each; the two stages need not do so at once.
    def kept(stage: int) -> int:
        return versions("zb-v", 8, 8, (stage, "forward"), frozenset({(stage, "backward")}))

    for mesh in range(4):
        both = kept(mesh), kept(7 - mesh)
        assert max(both) <= 8 <= sum(both)


def test_what_the_next_stage_reads_waits_until_it_has() -> None:
    # A forward lags by one round behind that of the stage before: one is read, one is made.
    sent = frozenset({frozenset({(1, "forward")})})
    assert versions("gpipe", 2, 8, (0, "forward"), frozenset(), sent) == 2
    assert versions("1f1b", 2, 8, (0, "forward"), frozenset(), sent) == 2
    # The first reader on another mesh is the one that it is sent for.
    both = frozenset({frozenset({(1, "forward"), (1, "backward")})})
    assert versions("gpipe", 2, 8, (0, "forward"), frozenset(), both) == 2
    # Between stages of one mesh, work of other micro-batches may come first.
    assert versions("zb-v", 4, 4, (1, "forward"), frozenset({(2, "forward")})) == 1


def test_what_is_received_is_there_while_it_is_read() -> None:
    only = frozenset({(1, "forward")})
    assert versions("1f1b", 2, 8, None, only) == 1
    assert versions("eager-1f1b", 2, 8, None, only) == 1
    both = frozenset({(0, "forward"), (0, "backward")})
    assert versions("1f1b", 2, 8, None, both) == 2


def test_a_weight_gradient_has_one_version() -> None:
    # It is added to its sum where it is made, however many backwards are in two parts then.
    for schedule, stages in (("zb-h1", 4), ("zb-v", 8)):
        made = (versions(schedule, stages, 8, (s, "backward"), frozenset()) for s in range(stages))
        assert {*made} == {1}


def test_forwards_alone_hand_on() -> None:
    sent = frozenset({frozenset({(1, "forward")})})
    assert versions("zb-v", 4, 4, (0, "forward"), frozenset(), sent, has_backward=False) == 2
