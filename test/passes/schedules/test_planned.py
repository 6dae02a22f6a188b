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
from alpa.passes.schedules.planned import (
    PLANNED,
    checked,
    in_flight,
    lists_of,
    of_words,
    splits_backward,
    weights_left,
)
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
    assert get_args(Schedule) == PLANNED
    assert [checked(name) for name in PLANNED] == [*PLANNED]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "zb-v",
            "plans cannot run zb-v yet: .*; take gpipe, 1f1b or zb-h1, or a table of your own",
        ),
        ("2f2b", '"2f2b" is neither the name of a schedule, gpipe, 1f1b or zb-h1, nor a file'),
        ("0F0,0B0;1F0,1X0", 'schedule:2:5: "1X0" is no work'),
        ("1F0,1B0;0F0,0B0", "schedule:1:1: 1F0 is on mesh 0: in a plan, stage 1 is on mesh 1"),
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
    schedule = lists_of("zb-h1", 4, 8)
    assert [weights_left(schedule, mesh) for mesh in range(4)] == [1, 2, 3, 4]
    assert [splits_backward(it) for it in ("1f1b", "zb-h1", ONE_LINE, SPLIT)] == [0, 1, 0, 1]


def test_own_schedules_are_for_their_numbers() -> None:
    with pytest.raises(ScheduleError, match="lists 2 meshes, and the plan has 3; plan with 2"):
        lists_of(ONE_LINE, 3, 3)
    with pytest.raises(ScheduleError, match="lists 3 micro-batches, and the plan has 4"):
        lists_of(ONE_LINE, 2, 4)
    with pytest.raises(ScheduleError, match="lists backwards, and the program has none"):
        lists_of(ONE_LINE, 2, 3, has_backward=False)


def runs_of(program: Program, stage: int) -> str:
    """The work of a stage's mesh, as in a table."""
    words: list[str] = []
    for it in write_script(program).on(f"mesh_{stage}"):
        if isinstance(it, Run) and it.fragment.part != "update":
            m = next(m for _, m in (*it.inputs, *it.outputs) if m is not None)
            letter = {"input": "I", "weight": "W"}.get(it.fragment.half or "", "")
            words.append(f"{stage}{letter or it.fragment.part[0].upper()}{m}")
    return ",".join(words)


def test_a_plan_runs_an_own_schedule(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2).lower(1)
    module = alpa.passes.run(text, f"alpa{{{OPTIONS} schedule={file}}}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert plan.schedule == ONE_LINE
    program = read_planned(module)
    assert ";".join(runs_of(program, stage) for stage in range(2)) == ONE_LINE
    assert verify(write_script(program)).in_flight == {"mesh_0": 2, "mesh_1": 2}


def test_a_plan_runs_the_two_parts_of_backwards() -> None:
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2).lower(1)
    program = read_planned(alpa.passes.run(text, f"alpa{{{OPTIONS} schedule=zb-h1}}"))
    # Nothing leaves the first stage: its backward is one part, which makes weight gradients.
    assert runs_of(program, 0) == "0F0,0F1,0W0,0F2,0W1,0W2"
    assert runs_of(program, 1) == "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"
    assert verify(write_script(program)).in_flight == {"mesh_0": 2, "mesh_1": 2}


def test_a_schedule_may_split_some_backwards() -> None:
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2).lower(1)
    module = alpa.passes.run(text, f"alpa{{{OPTIONS}}},split-backward")
    program = read_planned(module)
    program = replace(program, plan=replace(program.plan, schedule=SPLIT))
    verify(write_script(program))
    whole = "1F0,1I0,1F1,1I1,1W0,1F2,1W1,1I2,1W2"
    assert runs_of(program, 1) == whole


def test_a_plan_for_other_numbers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(OWN)
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2).lower(1)
    for options, message in (
        ("num-micro-batches=4", "lists 3 micro-batches, and the plan has 4"),
        ("num-micro-batches=3 num-stages=1", "lists 2 meshes, and the plan has 1"),
    ):
        with pytest.raises(ir.MLIRError, match=message):
            alpa.passes.run(text, f"alpa{{cluster=cpu:1x2 {options} schedule={file}}}")
