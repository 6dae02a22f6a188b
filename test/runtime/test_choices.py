"""Choices that a user fixes: their text, files of hints, and what they mean for a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import main_function, parse
from alpa.passes.stages.fixed_stages import FixedStage
from alpa.runtime.choices import (
    Choice,
    ChoiceError,
    ForcedSchedule,
    ForcedSharding,
    fixed_stages,
    forced_schedule,
    forced_shardings,
    parse_choice,
    read_hints,
    stage_text,
)

PROGRAM = """
func.func public @main(
    %0: tensor<8x8xf32> loc("params['w']"), %1: tensor<8xf32> loc("params['b']"),
    %2: tensor<4x8xf32> loc("x")) -> tensor<8x8xf32> {
  return %0 : tensor<8x8xf32>
}
"""


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (
            "state.params['wte'] = [axis0, -]",
            ForcedSharding(selector="state.params['wte']", dims=(("axis0",), ())),
        ),
        ("7=[axis0+axis1,-]", ForcedSharding(selector="7", dims=(("axis0", "axis1"), ()))),
        ("step = []", ForcedSharding(selector="step", dims=())),
        ("layers 0-7 on 1x8", FixedStage(first=0, last=7, submesh=(1, 8))),
        ("schedule = interleaved-1f1b:4", ForcedSchedule(schedule="interleaved-1f1b:4")),
        ("schedule = [axis0]", ForcedSharding(selector="schedule", dims=(("axis0",),))),
        ("layer 3 on 2x4 as 4x2", FixedStage(first=3, last=3, submesh=(2, 4), shape=(4, 2))),
    ],
)
def test_a_choice(text: str, choice: Choice) -> None:
    assert parse_choice(text) == choice
    again = stage_text(choice) if isinstance(choice, FixedStage) else str(choice)
    assert parse_choice(again) == choice


@pytest.mark.parametrize("text", ["", "w", "w = axis0", "w = [a b]", "layers 1 to 3 on 1x8", "=[]"])
def test_no_choice(text: str) -> None:
    with pytest.raises(ChoiceError, match="is no choice: expected an argument's sharding"):
        parse_choice(text)


def test_an_axis_splits_one_dimension() -> None:
    with pytest.raises(ChoiceError, match="a mesh axis splits one dimension at most, once"):
        parse_choice("w = [axis0, axis0]")


def test_the_arguments_that_are_meant() -> None:
    function = main_function(parse(PROGRAM))
    choices = [*map(parse_choice, ("params['w'] = [-, axis0]", "layers 0-1 on 1x4", "2 = [-, -]"))]
    assert forced_shardings(choices, function) == {0: ((), ("axis0",)), 2: ((), ())}
    assert fixed_stages(choices) == "0-1:1x4"


def test_a_schedule() -> None:
    choices = [parse_choice("w = [-]"), parse_choice("schedule = zb-v")]
    assert forced_schedule(choices, "auto") == forced_schedule(choices, "zb-v") == "zb-v"
    assert forced_schedule(choices[:1], "1f1b") == "1f1b"
    with pytest.raises(ChoiceError, match="the schedule is 1f1b already; leave one of them out"):
        forced_schedule(choices, "1f1b")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["params['v'] = [-]"], r"no argument is called params\['v'\]; there are params\['"),
        (["9 = [-]"], "there is no argument 9; @main has 3 arguments"),
        (["params* = [-]", "1 = [axis0]"], r"argument 1 is forced to \[-\] already"),
    ],
)
def test_arguments_that_cannot_be_meant(texts: list[str], problem: str) -> None:
    with pytest.raises(ChoiceError, match=problem):
        forced_shardings([*map(parse_choice, texts)], main_function(parse(PROGRAM)))


def test_a_file_of_hints(tmp_path: Path) -> None:
    path = tmp_path / "hints"
    path.write_text("# plan\n\nlayers 0-1 on 1x4  # the first\nw = [axis0]\n")
    assert read_hints(path) == ("layers 0-1 on 1x4", "w = [axis0]")
    path.write_text("w = [axis0]\nlayers\n")
    with pytest.raises(ChoiceError, match=r"hints:2: error: 'layers' is no choice"):
        read_hints(path)
    with pytest.raises(ChoiceError, match="no: error: No such file"):
        read_hints(tmp_path / "no")
