"""`fold_table`: the table and the cost of small models, and what is said where neither exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from alpa import passes
from alpa.dialects import main_function
from alpa.dialects.attributes import SolverReport
from alpa.passes.analysis.fold_classes import fold_classes, part_ops
from alpa.tools import zoo
from alpa.tools.fold_table import cost_table, main

T5_LARGE: dict[str, Any] = {
    "hidden_size": 16,
    "mlp_size": 32,
    "num_heads": 2,
    "head_size": 8,
    "vocab_size": 64,
    "source_length": 16,
    "target_length": 8,
}
"""Everything but its 24 layers per stack is small."""


@cache
def step(name: str) -> str:
    return zoo.get(name).lower(4)


def written(directory: Path, text: str) -> str:
    file = directory / "step.mlir"
    file.write_text(text)
    return str(file)


def rows(text: str) -> list[tuple[int, int]]:
    """Members and ops each of the printed classes."""
    found = re.findall(r"^ +\d+ +(\d+) +(\d+) +[\d.]+% +[\d.]+%  \S", text, re.MULTILINE)
    return [(int(members), int(size)) for members, size in found]


def t5_loss() -> str:
    program = zoo.get("t5-large", **T5_LARGE)
    lowered = jax.jit(program.loss).trace(
        program.state_shapes().params, {}, program.batch_shapes(2)
    )
    return lowered.lower(lowering_platforms=("cpu",)).as_text()


def t5_step() -> str:
    return zoo.get("t5-large", **T5_LARGE).lower(2)


@pytest.mark.parametrize("lower", [t5_loss, pytest.param(t5_step, marks=pytest.mark.slow)])
def test_the_forward_part_of_t5_large_folds_to_five_classes(lower: Callable[[], str]) -> None:
    module = passes.run(lower(), "simplify-trivial-ops")
    ops = part_ops(main_function(module), "forward")
    found = fold_classes(ops.ops, ops.same)
    assert [c.members for c in found.classes] == [1, 24, 1, 24, 1]
    assert found.share > 0.95
    assert found.folded_ops < len(found.ops) / 15


def test_the_folded_graph_does_not_grow_with_the_depth() -> None:
    def folded(num_layers: int) -> tuple[list[int], list[int]]:
        module = passes.run(
            zoo.get("gpt-tiny", num_layers=num_layers).lower(4), "simplify-trivial-ops"
        )
        ops = part_ops(main_function(module))
        classes = fold_classes(ops.ops, ops.same).classes
        return [c.members for c in classes], [c.size for c in classes]

    (members, sizes), (deep, same_sizes) = folded(4), folded(8)
    assert sizes == same_sizes
    assert deep == [2 * m if m > 1 else 1 for m in members]


def test_prints_the_classes_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, step("gpt-tiny"))
    assert main([file]) == 0
    text = capsys.readouterr().out
    assert text.startswith("forward part: ")
    assert f"{file}:" in text
    forward = rows(text)
    assert [members for members, _ in forward] == [1, 4, 1]
    total, folded = re.findall(r"(\d+) ops that depend on an argument fold to (\d+)", text)[0]
    assert int(total) == sum(members * size for members, size in forward)
    assert int(folded) == sum(size for _, size in forward)
    assert "3 classes; those of several members hold 86" in text

    assert main([file, "--part", "all"]) == 0
    everything = rows(capsys.readouterr().out)
    assert sum(m * size for m, size in everything) > sum(m * size for m, size in forward)
    assert main([file, "--min-share", "0.9"]) == 0
    assert rows(capsys.readouterr().out) == [(1, int(total))]


def test_costs_of_a_partitioned_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = (
        "simplify-trivial-ops,layer-cluster{num-layers=2},"
        "stage-mesh-partition{cluster=cpu:1x4 num-stages=2 num-micro-batches=2}"
    )
    file = written(tmp_path, str(passes.run(step("gpt-tiny"), pipeline)))
    assert main([file, "--part", "backward", "--cost"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("backward part: ")
    costs = re.findall(r"^mesh_(\d) +(\S+) s +(\S+) s +(\S+)% +(\S+)% +\d+$", text, re.M)
    assert [row[0] for row in costs] == ["0", "1"]
    for _, folded, whole, cost, most in costs:
        assert float(cost) == pytest.approx(100 * (float(folded) / float(whole) - 1), abs=0.01)
        assert float(most) >= float(cost)
        assert float(cost) <= 1.0
    assert re.search(r"^folding costs \S+% of the objective, at most \S+%$", text, re.M)


def report(mesh: str, folded: float, objective: float, bound: float) -> SolverReport:
    return SolverReport(
        mesh=mesh,
        intra="auto",
        status="optimal" if objective == bound else "time_limit",
        objective=objective,
        bound=bound,
        variables=50,
        peak_bytes=0,
        folded_objective=folded,
    )


def test_costs_are_summed_over_meshes_and_bounds_are_those_of_the_whole() -> None:
    first, second = report("mesh_0", 1.02, 1.0, 1.0), report("mesh_1", 3.0, 3.0, 2.9)
    lines = cost_table([first, second]).splitlines()
    assert lines[1].split() == ["mesh_0", "1.02", "s", "1", "s", "2.00%", "2.00%", "50"]
    assert lines[2].split() == ["mesh_1", "3", "s", "3", "s", "0.00%", "3.45%", "50"]
    assert lines[4] == "folding costs 0.50% of the objective, at most 3.08%"
    assert lines[5] == "the whole search ran out of time, raise --time-limit to know more"
    assert len(cost_table([first]).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("func.func @main() {", [], "error: "),
        ("module {}", [], "holds no function"),
        ("func.func @main() { return }", ["--cost"], "--cost needs a partitioned program"),
        ("func.func @main() { return }", ["--part", "update"], "known after layer-cluster only"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    words: str,
) -> None:
    file = written(tmp_path, text)
    assert main([file, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.startswith(file)


def test_a_file_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such.mlir"]) == 1
    assert capsys.readouterr().err == "no-such.mlir: error: No such file or directory\n"


def test_an_empty_program_has_no_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([written(tmp_path, "func.func @main() { return }")]) == 0
    assert "0 classes" in capsys.readouterr().out


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    assert "python -m alpa.tools.fold_table partitioned.mlir --cost" in capsys.readouterr().out


def test_clustered_programs_are_read_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = passes.run(step("gpt-tiny"), "simplify-trivial-ops,layer-cluster{num-layers=2}")
    assert main([written(tmp_path, str(module)), "--cost"]) == 1
    captured = capsys.readouterr()
    assert [members for members, _ in rows(captured.out)] == [1, 4, 1]
    assert "run stage-mesh-partition before this pass" in captured.err
