"""`alpa-plan` with `--force`, `--hints`, `--save-hints`, `--explain` and `--compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from alpa.tools.alpa_plan import main

PROGRAM = """
func.func public @main(%x: tensor<64x64xf32> {alpa.role = "batch"} loc("x"),
    %w: tensor<64x64xf32> loc("w"), %v: tensor<64x64xf32> loc("v")) -> tensor<64x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %z = stablehlo.dot_general %y, %v, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %z : tensor<64x64xf32>
}
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.mlir"
    path.write_text(PROGRAM)
    return str(path)


def planned(program: str, *options: str) -> int:
    return main([program, "--cluster", "cpu:1x4", "--num-layers", "2", *options])


def test_the_price_of_what_is_forced(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = ["--force-stage", "layer 0 on 1x2", "--force", "w = [axis0, -]"]
    assert planned(program, *choices, "--report", str(page := tmp_path / "plan.html")) == 0
    assert "What the forced choices cost" in page.read_text()
    text = capsys.readouterr().out
    assert "2 stages" in text
    (head,) = (line for line in text.splitlines() if line.endswith("difference"))
    assert head.split() == ["free", "forced", "difference"]


def test_hints_are_written_and_read(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hints, numbers = tmp_path / "hints", [tmp_path / "a.json", tmp_path / "b.json"]
    assert planned(program, "--save-hints", str(hints), "--json", str(numbers[0])) == 0
    assert planned(program, "--hints", str(hints), "--json", str(numbers[1])) == 0
    first, second = (json.loads(path.read_text()) for path in numbers)
    assert first["predicted_step_seconds"] == second["predicted_step_seconds"]
    capsys.readouterr()
    assert main(["--compare", *map(str, numbers)]) == 0
    assert capsys.readouterr().out.endswith("the stages are the same\n")
    page = tmp_path / "difference.html"
    assert main(["--compare", *map(str, numbers), "--report", str(page)]) == 0
    assert capsys.readouterr().out.endswith("the stages are the same\n")
    assert "The stages are the same." in page.read_text()
    assert main(["--compare", *map(str, numbers), "--report", str(tmp_path)]) == 1
    assert "it is a folder" in capsys.readouterr().err


def test_hints_for_a_zoo_program_have_names(tmp_path: Path) -> None:
    hints, numbers = tmp_path / "hints", tmp_path / "plan.json"
    options = ["--cluster", "cpu:1x2", "--batch-size", "4", "--num-micro-batches", "1"]
    zoo = ["zoo:gpt-tiny", *options, "--inter", "none", "--json", str(numbers)]
    assert main([*zoo, "--save-hints", str(hints)]) == 0
    assert "state.params['" in hints.read_text()
    first = json.loads(numbers.read_text())
    assert main([*zoo, "--hints", str(hints)]) == 0
    assert json.loads(numbers.read_text())["stages"] == first["stages"]


def test_an_explanation(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(program, "--explain", "w", "--explain", "stage 0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "w: tensor<64x64xf32>, 16 KiB, on mesh_0" in lines
    assert any(line.startswith("stage 0 of ") for line in lines)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--explain", "u"], "'u' cannot be explained: no argument is called u; there are"),
        (["--force", "u = [-, -]"], "'u = [-, -]' cannot be forced: no argument is called u"),
        (["--hints", "no/such"], "no/such: error: No such file"),
        (["--save-hints", "no/such/file"], "cannot write no/such/file: there is no folder"),
        (["--force", "w = [axis7, -]"], "the mesh has no axis axis7"),
        (["--force-stage", "layer 7 on 1x4"], "the program is cut into 2 layer(s)"),
    ],
)
def test_what_a_program_lacks(
    options: list[str], problem: str, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(program, *options) == 1
    out, err = capsys.readouterr()
    assert problem in err
    assert not out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "the following arguments are required: FILE|zoo:NAME, --cluster"),
        (["program.mlir"], "the following arguments are required: --cluster"),
        (["program.mlir", "--compare", "a", "b"], "plans nothing: leave out the program"),
        (["--compare", "a", "b", "--json", "c"], "plans nothing: leave out --json"),
        (["--compare", "no", "such"], "no: error: No such file"),
        (["program.mlir", "--cluster", "cpu:1x4", "--force", "w"], "'w' is no choice"),
    ],
)
def test_command_lines_that_are_invalid(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The parser ends the process; what is wrong in files does not.
    with pytest.raises(SystemExit) as end:
        sys.exit(main(arguments))
    assert end.value.code == 1
    assert problem in capsys.readouterr().err


def test_a_program_with_tuples_is_asked_about_their_elements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, hints = tmp_path / "program.mlir", tmp_path / "hints"
    program.write_text("""
func.func public @main(%t: tuple<tensor<64x64xf32>, tensor<64x64xf32>>)
    -> tuple<tensor<64x64xf32>> {
  %x = stablehlo.get_tuple_element %t[0]
    : (tuple<tensor<64x64xf32>, tensor<64x64xf32>>) -> tensor<64x64xf32>
  %w = stablehlo.get_tuple_element %t[1]
    : (tuple<tensor<64x64xf32>, tensor<64x64xf32>>) -> tensor<64x64xf32>
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %r = stablehlo.tuple %y : tuple<tensor<64x64xf32>>
  return %r : tuple<tensor<64x64xf32>>
}
""")
    command = [str(program), "--cluster", "cpu:1x2"]
    assert main([*command, "--save-hints", str(hints), "--explain", "1"]) == 0
    assert "argument 1: tensor<64x64xf32>" in capsys.readouterr().out
    assert hints.read_text().splitlines()[-1].startswith("1 = [")
    assert main([*command, "--hints", str(hints), "--compare-with-jax"]) == 0
    assert "1 of 1 results are equal" in capsys.readouterr().out
