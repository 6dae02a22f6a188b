"""`fold_table`: the table and the cost of small models, and the errors where neither exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import FLOPS
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import SolverReport
from alpa.tools import zoo
from alpa.tools.fold_table import cost_table, fold_classes, main

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
    """The layers and ops of each of the printed classes."""
    found = re.findall(r"^ +\d+ +(\d+) +(\d+) +[\d.]+% +[\d.]+%  layer_\d", text, re.MULTILINE)
    return [(int(layers), int(ops)) for layers, ops in found]


def clustered(text: str, num_layers: int) -> ir.Module:
    return passes.run(text, f"simplify-trivial-ops,layer-cluster{{num-layers={num_layers}}}")


@pytest.mark.slow
def test_the_layers_of_t5_large_fold_to_those_at_the_ends_and_two_more() -> None:
    classes = fold_classes(clustered(zoo.get("t5-large", **T5_LARGE).lower(2), 48))
    assert [len(c.layers) for c in classes] == [1, 23, 1, 21, 1, 1]
    assert sum(c.ops for c in classes) < sum(c.ops * len(c.layers) for c in classes) / 6


def test_the_folded_program_does_not_grow_with_the_depth() -> None:
    def folded(num_layers: int) -> tuple[list[int], list[int], list[int]]:
        text = zoo.get("gpt-tiny", num_layers=num_layers).lower(4)
        classes = fold_classes(clustered(text, num_layers))
        layers = [len(c.layers) for c in classes]
        return layers, [c.ops for c in classes], [c.flops for c in classes]

    (layers, ops, flops), (deep, same_ops, same_flops) = folded(4), folded(8)
    assert (layers, deep) == ([1, 2, 1], [1, 6, 1])
    assert (ops, flops) == (same_ops, same_flops)


def test_classes_hold_each_layer_and_op_once() -> None:
    module = clustered(step("gpt-tiny"), 4)
    classes = fold_classes(module)
    assert sorted(layer for c in classes for layer in c.layers) == list(range(4))
    computations = [
        op
        for op in body(main_function(module)).operations
        if isinstance(op, mpmd.NamedComputationOp) and Origin.of(op).layer is not None
    ]
    ops = sum(len(body(op).operations) - 1 for op in computations)
    flops = sum(ir.IntegerAttr(op.attributes[FLOPS]).value for op in computations)
    assert sum(len(c.layers) * c.ops for c in classes) == ops
    assert sum(len(c.layers) * c.flops for c in classes) == flops


def test_prints_the_classes_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, step("gpt-tiny"))
    assert main([file, "--num-layers", "4"]) == 0
    text = capsys.readouterr().out
    assert f"layer_1 {file}:" in text
    printed = rows(text)
    assert [layers for layers, _ in printed] == [1, 2, 1]
    total = sum(layers * ops for layers, ops in printed)
    folded = sum(ops for _, ops in printed)
    assert text.startswith(f"4 layers with {total} ops fold to 3 with {folded}\n")
    assert f"classes of several layers hold {2 * printed[1][1] / total:.1%} of the ops" in text

    assert main([file]) == 0
    text = capsys.readouterr().out
    printed = rows(text)
    layers, total = sum(layers for layers, _ in printed), sum(n * ops for n, ops in printed)
    assert text.startswith(f"{layers} layers with {total} ops fold to {len(printed)} with ")


def test_costs_of_a_partitioned_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = (
        "simplify-trivial-ops,layer-cluster{num-layers=2},"
        "stage-mesh-partition{cluster=cpu:1x4 num-stages=2 num-micro-batches=2}"
    )
    file = written(tmp_path, str(passes.run(step("gpt-tiny"), pipeline)))
    assert main([file, "--cost"]) == 0
    text = capsys.readouterr().out
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
    assert lines[5] == "the whole search ran out of time; raise --time-limit for a tighter bound"
    assert len(cost_table([first]).splitlines()) == 4


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("func.func @main() {", [], "error: "),
        ("module {}", [], "holds no function"),
        ("func.func @main() { return }", ["--cost"], "run stage-mesh-partition before this pass"),
        ("func.func @main() { return }", ["--num-layers", "2"], "cannot cut 0 forward ops into 2"),
    ],
)
def test_an_impossible_request_is_an_error_of_one_sentence(
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
    assert capsys.readouterr().out.startswith("0 layers with 0 ops fold to 0 with 0\n")


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    assert "python -m alpa.tools.fold_table partitioned.mlir --cost" in capsys.readouterr().out


def test_clustered_programs_are_read_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, str(clustered(step("gpt-tiny"), 4)))
    assert main([file, "--num-layers", "2"]) == 0
    assert [layers for layers, _ in rows(capsys.readouterr().out)] == [1, 2, 1]


def test_layers_that_are_merged_into_stages_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = "stage-mesh-partition{cluster=cpu:1x2 num-stages=2}"
    file = written(tmp_path, str(passes.run(clustered(step("gpt-tiny"), 2), pipeline)))
    assert main([file]) == 1
    assert "merged into stages" in capsys.readouterr().err
