"""Costs of layers that later searches read from a folder."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import read_arguments, read_results
from alpa.dialects.plan import Plan
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.stages.class_costs import ClassCosts
from alpa.passes.stages.class_problem import ClassProblem, ClassSolver
from alpa.passes.stages.costing import Costing
from alpa.passes.stages.costs_folder import CostsFolder
from alpa.passes.stages.layer_classes import LayerClasses, layer_classes
from alpa.passes.workers import Workers
from alpa.tools import zoo

_V100S = Cluster.parse("v100-16gb:1x4")
CLUSTER = replace(_V100S, device=replace(_V100S.device, memory=1 << 20))
"""With so little memory, layers are sharded for prices of memory, too."""
PLAN = Plan(num_micro_batches=2, schedule="1f1b")
MESH = (1, 4, (2, 2))
TWO = """
func.func public @main(%x: tensor<8x64xf32>, %w: tensor<64x64xf32>, %v: tensor<64x64xf32>)
    -> tensor<8x64xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %z = stablehlo.dot_general %y, %v, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  return %z : tensor<8x64xf32>
}
"""


@pytest.fixture(scope="module")
def classes() -> LayerClasses:
    layers = "simplify-trivial-ops,layer-cluster{num-layers=2}"
    module = passes.run(zoo.get("gpt-tiny", num_layers=2).lower(2), layers)
    function = main_function(module)
    arguments, results = read_arguments(function), read_results(function)
    with module.context:
        return layer_classes(Graph.of(body(function)), arguments, results, 2, CLUSTER, PLAN)


@pytest.fixture(scope="module")
def solver(classes: LayerClasses) -> ClassSolver:
    return ClassSolver(classes=classes, cluster=CLUSTER, plan=PLAN)


class Unasked(ClassSolver):
    """A solver whose answers are all in the folder."""

    def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
        raise AssertionError("the answer is in the folder")


def asked(solver: ClassSolver, path: Path) -> tuple[Costing, list[ClassCosts]]:
    costing = Costing(solver=solver, folder=CostsFolder(path=path, solver=solver))
    with solver.classes.module.context:
        return costing, costing.begin(Workers(0), MESH, inf)()


def test_a_later_search_reads_what_an_earlier_one_found(
    solver: ClassSolver, tmp_path: Path
) -> None:
    first, found = asked(solver, tmp_path)
    again = Unasked(classes=solver.classes, cluster=CLUSTER, plan=replace(PLAN, schedule="gpipe"))
    second, read = asked(again, tmp_path)
    assert (first.read, second.read) == ([], [MESH])
    assert len(found) == len(read) > 1
    for mine, other in zip(found, read, strict=True):
        np.testing.assert_array_equal(mine.by_class, other.by_class)
        assert (mine.links, mine.exchanged) == (other.links, other.exchanged)


def test_bounds_are_read(solver: ClassSolver, tmp_path: Path) -> None:
    even = np.ones((2, len(solver.classes.classes)))
    again = Unasked(classes=solver.classes, cluster=CLUSTER, plan=PLAN)
    found, read = (
        Costing(solver=its, folder=CostsFolder(path=tmp_path, solver=its)).begin_bound(
            Workers(0), MESH, even
        )()
        for its in (solver, again)
    )
    np.testing.assert_array_equal(found.seconds, read.seconds)
    other = CostsFolder(path=tmp_path, solver=solver)
    assert other.file("bound", MESH, even.tolist()).exists()
    assert not other.file("bound", MESH, (2 * even).tolist()).exists()


def test_an_answer_that_is_asked_for_twice_is_read_once(
    solver: ClassSolver, tmp_path: Path
) -> None:
    asked(solver, tmp_path)
    costing = Costing(solver=solver, folder=CostsFolder(path=tmp_path, solver=solver))
    costing.begin(Workers(0), MESH, inf)  # Nobody waits for it.
    costing.begin(Workers(0), MESH, inf)()
    assert costing.read == [MESH]


def test_what_answers_depend_on_is_in_the_name(solver: ClassSolver, tmp_path: Path) -> None:
    def file(solver: ClassSolver, submesh: tuple[int, int, tuple[int, ...]], enough: float) -> Path:
        return CostsFolder(path=tmp_path, solver=solver).file("costs", submesh, enough)

    def like(plan: Plan = PLAN, cluster: Cluster = CLUSTER) -> ClassSolver:
        return ClassSolver(classes=solver.classes, cluster=cluster, plan=plan)

    files = [
        file(solver, MESH, inf),
        file(solver, (1, 4, (4,)), inf),
        file(solver, MESH, 1.0),
        file(like(plan=replace(PLAN, num_micro_batches=4)), MESH, inf),
        file(like(plan=replace(PLAN, accumulate_dtype="same")), MESH, inf),
        file(like(cluster=Cluster.parse("h100:1x4")), MESH, inf),
        file(replace(solver, intra="zero2"), MESH, inf),
    ]
    assert len(set(files)) == len(files)
    assert file(like(), MESH, inf) == files[0]


def test_a_part_of_a_file_is_found_anew(solver: ClassSolver, tmp_path: Path) -> None:
    asked(solver, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for part in (whole[: len(whole) // 2], b"", b"not ours"):
        file.write_bytes(part)
        costing, _ = asked(solver, tmp_path)
        assert not costing.read
        assert len(file.read_bytes()) == len(whole)


def test_plans_are_the_same_with_a_folder(tmp_path: Path) -> None:
    program = str(zoo.get("gpt-tiny", num_layers=2).lower(2))
    options = "cluster=v100-16gb:1x4 num-micro-batches=2"
    folder = f"{options} costs-folder={tmp_path / 'costs'}"
    remarks: list[str] = []

    def planned(options: str) -> str:
        def remark(location: ir.Location, text: str) -> None:
            remarks.append(text)

        return str(passes.run(program, f"alpa{{{options}}}", on_remark=remark))

    plain, first = planned(options), planned(folder)
    assert not any("were read" in text for text in remarks)
    second = planned(folder)
    assert plain == first == second
    (text,) = (text for text in remarks if "were read from" in text)
    assert re.match(r"the costs of layers on ([2-9] meshes|1 mesh) were read from ", text)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = zoo.get("gpt-tiny", num_layers=2).lower(2)
    options = f"cluster=v100-16gb:1x4 num-micro-batches=2 costs-folder={tmp_path / 'file'}"
    with pytest.raises(ir.MLIRError, match=r"costs-folder=.*Not a directory"):
        passes.run(program, f"alpa{{{options}}}")


def test_the_remark_counts_one_mesh(tmp_path: Path) -> None:
    remarks: list[str] = []
    options = f"cluster=cpu:1x2 num-layers=2 costs-folder={tmp_path / 'costs'}"
    for _ in range(2):
        passes.run(TWO, f"alpa{{{options}}}", on_remark=lambda _, text: remarks.append(text))
    assert f"the costs of layers on 1 mesh were read from {tmp_path / 'costs'}" in remarks
