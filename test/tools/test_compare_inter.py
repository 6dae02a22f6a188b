"""`compare_inter`: a row for each way to plan, and a complaint if `auto` is not the best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from alpa.dialects import ir, main_function, parse
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import Planned, Settings, plan
from alpa.tools import compare_inter
from alpa.tools.compare_inter import Outcome, complaint, main, rows
from alpa.tools.zoo import GPT_TINY, TrainingProgram

# A training step of two layers, with losses y . y / 2 and plain SGD.
STEP = """\
func.func public @main(
    %w0: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %w1: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}, tensor<16x16xf32> {alpa.result = "state:1"}) {
  %a = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %h = stablehlo.tanh %a : tensor<8x16xf32>
  %m = stablehlo.custom_call @alpa.layer_boundary(%h) : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %y = stablehlo.dot_general %m, %w1, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %g1 = stablehlo.dot_general %m, %y, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %gh = stablehlo.dot_general %y, %w1, contracting_dims = [1] x [1]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %hh = stablehlo.multiply %h, %h : tensor<8x16xf32>
  %gg = stablehlo.multiply %gh, %hh : tensor<8x16xf32>
  %ga = stablehlo.subtract %gh, %gg : tensor<8x16xf32>
  %g0 = stablehlo.dot_general %x, %ga, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %n0 = stablehlo.subtract %w0, %g0 : tensor<16x16xf32>
  %n1 = stablehlo.subtract %w1, %g1 : tensor<16x16xf32>
  return %n0, %n1 : tensor<16x16xf32>, tensor<16x16xf32>
}
"""
RESTRICTED = ["auto", "equal-layers", "equal-ops", "intra-only", "inter-only"]
TWO = ["--cluster", "cpu:1x2", "--num-micro-batches", "2"]


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "step.mlir"
    path.write_text(STEP)
    return str(path)


def table(out: str) -> dict[str, list[str]]:
    """The cells of each row by its first cell, without the header and its rule."""
    lines = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("|")]
    return {first: cells for first, *cells in lines[2:]}


def names(cluster: str) -> list[str]:
    return [row.name for row in rows(Settings(cluster=cluster))]


def test_the_grid_covers_the_cluster_in_every_way() -> None:
    assert names("cpu:1x2") == [
        *RESTRICTED,
        "1x1 data-parallel",
        *("2x1 data-parallel", "2x1 zero2", "1x2 megatron"),
    ]
    # Three hosts of two leave submeshes of 1, 2 and 6 devices: four do not divide six.
    shapes = {name.split()[0] for name in names("cpu:3x2")[len(RESTRICTED) :]}
    assert shapes == {"1x1", "2x1", "1x2", "6x1", "3x2", "2x3", "1x6"}


def test_prints_a_row_for_each_way_to_plan(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    assert main([step, *TWO, "--json", str(path)]) == 0
    found = table(capsys.readouterr().out)
    assert list(found) == names("cpu:1x2")
    assert all(re.fullmatch(r"\S+ s", cells[0]) for cells in found.values())
    stages = {name: cells[2:4] for name, cells in found.items()}
    assert stages["intra-only"][0] == "1"
    assert stages["inter-only"] == ["2", "1"]
    assert stages["1x1 data-parallel"] == ["2", "1x1"]
    assert stages["2x1 zero2"] == ["1", "2x1"]
    assert stages["1x2 megatron"] == ["1", "1x2"]
    assert all(cells[4].endswith(" of 16 GiB") for cells in found.values())

    numbers = json.loads(path.read_text())
    assert (numbers["cluster"], numbers["num_micro_batches"]) == ("cpu:1x2", 2)
    (program,) = numbers["programs"]
    for row in program["rows"]:
        assert found[row["name"]][0] == f"{row['seconds']:.4g} s"
        assert found[row["name"]][1] == f"{row['objective'] / row['seconds']:.3f}"
        assert row["search_seconds"] > 0
        assert row["problem"] is None


def test_two_layers_cannot_be_four_stages(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cluster", "cpu:1x4", *TWO[2:], "--row", "intra-only", "--row", "inter-only"]
    assert main([step, *arguments]) == 0
    out = capsys.readouterr().out
    found = table(out)
    assert found["inter-only"][:2] == ["not possible", ""]
    assert found["intra-only"][2] == "1"
    (reason,) = re.findall(r"^\* inter-only: (.*)$", out, re.MULTILINE)
    assert reason.startswith(f"{step}:1:1: error: ")
    assert "2 layers" in reason


def test_what_does_not_fit_is_out_of_memory(
    step: str, small_cluster: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = small_cluster("2KiB", devices=2)
    arguments = ["--cluster", str(cluster), *TWO[2:], "--row", "intra-only"]
    assert main([step, *arguments]) == 1
    captured = capsys.readouterr()
    assert table(captured.out)["intra-only"][0] == "out of memory"
    assert f"error: {step}: none of the rows can be planned" in captured.err


def test_the_status_says_that_auto_is_worse(
    step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best: list[float] = []

    def slower(module: ir.Module, settings: Settings, clock: Clock) -> Planned:
        planned = plan(module, replace(settings, inter="none"), clock)
        best.append(planned.plan.predicted_step_seconds)
        if settings.inter == "auto":
            slow = replace(planned.plan, predicted_step_seconds=1.1 * best[-1])
            with planned.module.operation.location:
                slow.write(main_function(planned.module))
        return planned

    monkeypatch.setattr(compare_inter, "plan", slower)
    arguments = [step, *TWO, "--row", "auto", "--row", "intra-only"]
    assert main(arguments) == 1
    assert "is 10.0% longer than the " in (error := capsys.readouterr().err)
    assert error.endswith("of intra-only; 2.0% is tolerated\n")
    assert main([*arguments, "--tolerance", "0.11"]) == 0


def outcome(name: str, seconds: float | None) -> Outcome:
    return Outcome(name=name, seconds=seconds, search_seconds=1.0)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([outcome("auto", 1.0), outcome("a", 1.5), outcome("b", None)], None),
        ([outcome("auto", 1.01), outcome("a", 1.0)], None),
        ([outcome("a", 1.0), outcome("b", 2.0)], None),
        ([outcome("auto", 1.5), outcome("a", 1.2), outcome("b", 1.0)], "50.0% longer .* of b"),
        ([outcome("auto", None), outcome("a", 2.0)], "auto cannot be planned, but a takes 2 s"),
        ([outcome("auto", None), outcome("a", None)], "none of the rows can be planned"),
    ],
)
def test_complaints(outcomes: list[Outcome], words: str | None) -> None:
    found = complaint(outcomes, 0.02)
    assert found is None if words is None else re.search(words, found or "")


def test_a_zoo_program_is_lowered_at_the_size_of_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def lowered(program: TrainingProgram, micro_batch_size: int) -> ir.Module:
        sizes.append(micro_batch_size)
        return parse(STEP)

    monkeypatch.setattr(compare_inter, "lowered", lowered)
    command = ["zoo:gpt-tiny", *TWO, "--row", "intra-only"]
    assert main(command) == 0
    assert main([*command, "--micro-batch-size", "3"]) == 0
    assert sizes == [GPT_TINY.global_batch_size // 2, 3]
    assert "zoo:gpt-tiny\n\n| plan |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zoo:gpt-tiny", "--num-micro-batches", "3"], "cannot be cut into 3 equal"),
        (["zoo:no-model"], "no-model"),
        (["no-file.mlir"], "no-file.mlir: error: "),
        (["no-file.mlir", "--micro-batch-size", "2"], "is for zoo programs"),
        (["zoo:gpt-tiny", "--cluster", "no-such:1x2"], "no-such"),
        (["zoo:gpt-tiny", "--row", "gird"], "there is no row gird"),
        (["zoo:gpt-tiny", "--json", "no/such/folder"], "cannot write no/such/folder"),
    ],
)
def test_wrong_arguments_are_a_sentence(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TWO, *arguments]) == 1
    assert words in capsys.readouterr().err


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m alpa.tools.compare_inter step.mlir" in capsys.readouterr().out
