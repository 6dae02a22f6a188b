"""Which schedules plans take, and what a user's own schedule does to a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import alpa.passes
from alpa.dialects import ir, main_function
from alpa.dialects.plan import Plan, Schedule
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import Run, write_script
from alpa.passes.plan.reader import read_planned
from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.named import NAMES
from alpa.passes.schedules.planned import (
    OTHERS,
    checked,
    chunks_of,
    fill_share,
    in_flight,
    label,
    lists_of,
    of_words,
    splits_backward,
)
from alpa.passes.schedules.table import read_table, to_table
from alpa.passes.schedules.verify import ScheduleError
from alpa.runtime.script_checks import verify
from alpa.tools import zoo

# Stage 0 runs both forwards before the first backward, stage 1 all three.
OWN = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n"
ONE_LINE = OWN.replace("\n", ";").rstrip(";")
# The last stage leaves the weight gradients of micro-batch 0 for later.
SPLIT = "0F0,0F1,0B0,0F2,0B1,0B2;1F0,1I0,1F1,1I1,1W0,1F2,1W1,1B2"
OPTIONS = "cluster=cpu:1x2 num-layers=2 num-micro-batches=3 mesh-shape=1"


def test_names_are_those_of_plans() -> None:
    assert get_args(Schedule) == NAMES
    names = [*NAMES, "interleaved-1f1b:4"]
    assert [checked(name) for name in names] == [label(name) for name in names] == names
    assert [Plan(schedule=name).schedule for name in names] == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2f2b", '"2f2b" is neither the name of a schedule, gpipe, .* or dualpipe-v, nor a file'),
        ("2f2b", "nor a file with a table; the planner also takes auto and terapipe"),
        ("zb-v:3", '"zb-v:3" is neither the name of a schedule'),
        ("interleaved-1f1b:0", '"interleaved-1f1b:0" is neither the name of a schedule'),
        ("0F0,0B0;1F0,1X0", 'schedule:2:5: "1X0" is no work'),
        ("1F0,1B0;0F0,0B0", "schedule:1:1: 1F0 is on mesh 0: in a plan, stage 1 is on mesh 1"),
        (
            "0F0,2F0,2B0,0B0;1F0,1B0",
            "mesh 0 has 2 stages and mesh 1 has 1: in a plan, all meshes have equally many",
        ),
    ],
)
def test_what_plans_refuse(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        checked(text)


def test_texts_of_own_schedules(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(f"# of two meshes\n{OWN}")
    rows = [row.split(",") for row in OWN.split()]
    assert checked(str(file)) == checked(ONE_LINE) == of_words(rows) == ONE_LINE
    file.write_text("\n0F0,0F0\n")
    with pytest.raises(ScheduleError, match=r"own.csv:2:5: 0F0 is listed twice"):
        checked(str(file))
    file.write_bytes(b"0F0,0B0\n1F0,\xff")
    for read in (checked, lambda name: read_table(Path(name))):
        with pytest.raises(ScheduleError, match=r"own.csv:2:5: byte 0xff is not UTF-8; a table"):
            read(str(file))


def test_memory_follows_from_the_lists() -> None:
    assert [in_flight("gpipe", 8, s) for s in (1, 4)] == [8, 8]
    assert [in_flight("1f1b", 8, s) for s in (1, 4, 12)] == [1, 4, 8]
    assert [in_flight(ONE_LINE, 3, s, 2) for s in (2, 1)] == [2, 2]
    assert in_flight("0F0,0B0,0F1,0B1;1F0,1B0,1F1,1B1", 2, 1) == 1


def test_zb_h1_holds_as_much_on_each_mesh_as_1f1b_on_the_first() -> None:
    assert [in_flight("zb-h1", 8, s, 4) for s in (4, 3, 2, 1)] == [4, 4, 4, 4]
    assert in_flight("zb-h1", 2, 1, 4) == 2
    # Of an unknown number of stages: as many as there are micro-batches, at most.
    assert in_flight("zb-h1", 8, 1) == 8
    assert [splits_backward(it) for it in ("1f1b", "zb-h1", ONE_LINE, SPLIT)] == [0, 1, 0, 1]


def test_a_mesh_with_several_stages_keeps_what_they_keep_together() -> None:
    names = ["1f1b", "zb-v", "interleaved-1f1b", "interleaved-1f1b:4", "0F0,3F0;1F0,2F0"]
    assert [chunks_of(name) for name in names] == [1, 2, 2, 4, 2]
    # Of 4 meshes ZB-V keeps 8 activations on each: 4 of each of its two stages.
    assert [in_flight("zb-v", 8, s, 8) for s in (8, 5, 1)] == [4, 4, 4]
    # V-Min keeps 4: the first mesh of the stages 0 and 7, and the last one of the stages 3 and 4.
    assert [in_flight("v-min", 8, s, 8) for s in (8, 5, 4, 1)] == [2, 2, 2, 2]
    # The first mesh keeps 11, as torch's table says, the last one 5.
    assert [in_flight("interleaved-1f1b", 8, s, 8) for s in (8, 4, 5, 1)] == [6, 6, 3, 3]
    assert in_flight("zb-v", 8, 1) == 8
    schedule = lists_of("zb-v", 8, 8)
    assert [schedule.mesh_of[stage] for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_numbers_of_stages_and_micro_batches_must_fit() -> None:
    with pytest.raises(ScheduleError, match="zb-v has 2 stages on each mesh, and 3 is no multiple"):
        lists_of("zb-v", 3, 4)
    with pytest.raises(ScheduleError, match="in groups of 2, the meshes, and 3 is no multiple"):
        lists_of("interleaved-1f1b", 4, 3)
    with pytest.raises(ScheduleError, match="at least as many micro-batches as stages, 4"):
        lists_of("dualpipe-v", 4, 3)


def test_forwards_alone_keep_their_order() -> None:
    assert to_table(lists_of("zb-v", 4, 2, has_backward=False)) == (
        "0F0,0F1,3F0,3F1\n1F0,2F0,1F1,2F1\n"
    )


def test_own_schedules_are_for_their_numbers() -> None:
    with pytest.raises(ScheduleError, match="lists 2 stages, and the plan has 3; plan with 2"):
        lists_of(ONE_LINE, 3, 3)
    with pytest.raises(ScheduleError, match="lists 3 micro-batches, and the plan has 4"):
        lists_of(ONE_LINE, 2, 4)
    with pytest.raises(ScheduleError, match="lists backwards, and the program has none"):
        lists_of(ONE_LINE, 2, 3, has_backward=False)


def runs_of(program: Program, mesh: int) -> str:
    """The work of a mesh, as in a table."""
    words: list[str] = []
    for it in write_script(program).on(f"mesh_{mesh}"):
        if isinstance(it, Run) and it.fragment.part != "update":
            m = next(m for _, m in (*it.inputs, *it.outputs) if m is not None)
            letter = {"input": "I", "weight": "W"}.get(it.fragment.half or "", "")
            words.append(f"{it.fragment.stage}{letter or it.fragment.part[0].upper()}{m}")
    return ",".join(words)


@pytest.fixture(scope="module")
def gpt() -> str:
    return zoo.get("gpt-tiny", optimizer="sgd", num_layers=2).lower(2)


def test_a_plan_runs_an_own_schedule(gpt: str, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    module = alpa.passes.run(gpt, f"alpa{{{OPTIONS} schedule={file}}}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert plan.schedule == ONE_LINE
    program = read_planned(module)
    assert ";".join(runs_of(program, stage) for stage in range(2)) == ONE_LINE
    assert verify(write_script(program)).in_flight == {"mesh_0": 2, "mesh_1": 2}


def test_a_plan_runs_the_two_parts_of_backwards(gpt: str) -> None:
    program = read_planned(alpa.passes.run(gpt, f"alpa{{{OPTIONS} schedule=zb-h1}}"))
    # Nothing leaves the first stage: its backward is one part, which makes weight gradients.
    assert runs_of(program, 0) == "0F0,0F1,0W0,0F2,0W1,0W2"
    assert runs_of(program, 1) == "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"
    assert verify(write_script(program)).in_flight == {"mesh_0": 2, "mesh_1": 2}


# As interleaved 1F1B, but the first micro-batch is ahead.
TWO_STAGES_EACH = "0F0,2F0,2B0,0F1,2F1,0B0,2B1,0B1;1F0,3F0,3B0,1B0,1F1,3F1,3B1,1B1"


def test_an_own_schedule_may_have_several_stages_per_mesh() -> None:
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=4).lower(2)
    options = OPTIONS.replace("num-layers=2", "num-layers=4").replace("batches=3", "batches=2")
    program = read_planned(alpa.passes.run(text, f"alpa{{{options} schedule={TWO_STAGES_EACH}}}"))
    assert [f.stage for f in program.fragments if f.part == "forward"] == [0, 1, 2, 3]
    assert [mesh.name for mesh in program.meshes] == ["mesh_0", "mesh_1"]
    assert ";".join(runs_of(program, mesh) for mesh in range(2)) == TWO_STAGES_EACH
    verify(write_script(program))


def test_a_schedule_may_split_some_backwards(gpt: str) -> None:
    module = alpa.passes.run(gpt, f"alpa{{{OPTIONS} schedule=1f1b}},split-backward")
    program = read_planned(module)
    program = replace(program, plan=replace(program.plan, schedule=SPLIT))
    verify(write_script(program))
    whole = "1F0,1I0,1F1,1I1,1W0,1F2,1W1,1I2,1W2"
    assert runs_of(program, 1) == whole


def test_a_plan_for_other_numbers_is_refused(gpt: str, tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    for options, message in (
        ("num-micro-batches=4", "lists 3 micro-batches, and the plan has 4"),
        ("num-micro-batches=3 num-stages=1", "lists 2 stages, and the plan has 1"),
    ):
        with pytest.raises(ir.MLIRError, match=message):
            alpa.passes.run(gpt, f"alpa{{cluster=cpu:1x2 {options} schedule={file}}}")


@pytest.mark.parametrize("meshes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("eager-1f1b", 1),
        ("interleaved-1f1b", 1 / 2),
        ("interleaved-1f1b:4", 1 / 4),
        ("zb-h1", 1 / 3),
        ("zb-v", 1 / 6),
        ("dualpipe-v", 1 / 6),
    ],
)
def test_the_bubble_beside_that_of_1f1b(schedule: str, share: float, meshes: int) -> None:
    found = fill_share(schedule, meshes * chunks_of(schedule), 16)
    assert found == pytest.approx(share if meshes > 1 else 1)


@pytest.mark.parametrize("meshes", [2, 3, 5, 8])
@pytest.mark.parametrize("schedule", OTHERS)
def test_the_bubble_is_that_of_the_simulated_schedule(schedule: str, meshes: int) -> None:
    for batches in (meshes, 2 * meshes, 3 * meshes, 2 * meshes + 1, 4 * meshes + 3):
        stages = meshes * chunks_of(schedule)
        try:
            lists = lists_of(schedule, stages, batches)
        except ScheduleError:
            with pytest.raises(ScheduleError):
                fill_share(schedule, stages, batches)
            continue
        found = measure(lists, Costs.uniform(stages))
        share = found.bubble * batches / ((meshes - 1) * max(found.busy))
        assert fill_share(schedule, stages, batches) == pytest.approx(share, rel=1e-12)


def test_the_bubble_of_a_table_is_not_known() -> None:
    assert fill_share(ONE_LINE, 2, 3) == 1
