"""`PlanReport`: the numbers of a small plan, and the contents of `PLAN.json`."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from alpa import passes
from alpa.dialects import ir
from alpa.dialects.plan import SolverReport
from alpa.passes import PassError
from alpa.passes.plan.report import MEMORY_MARGIN, PlanReport, SolverSummary
from alpa.passes.plan.split_factors import in_words
from alpa.passes.plan.table import plan_table
from alpa.tools import zoo

PROGRAM = """\
func.func public @main(
    %w0: tensor<64x64xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %w1: tensor<64x64xf32> {alpa.role = "state", tf.aliasing_output = 1 : i32},
    %x: tensor<8x64xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<64x64xf32> {alpa.result = "state:0"}, tensor<64x64xf32> {alpa.result = "state:1"}) {
  %a = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %h = stablehlo.tanh %a : tensor<8x64xf32>
  %y = stablehlo.dot_general %h, %w1, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %g1 = stablehlo.dot_general %h, %y, contracting_dims = [0] x [0]
    : (tensor<8x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
  %d = stablehlo.dot_general %y, %w1, contracting_dims = [1] x [1]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %d1 = stablehlo.multiply %d, %h : tensor<8x64xf32>
  %g0 = stablehlo.dot_general %x, %d1, contracting_dims = [0] x [0]
    : (tensor<8x64xf32>, tensor<8x64xf32>) -> tensor<64x64xf32>
  %n0 = stablehlo.subtract %w0, %g0 : tensor<64x64xf32>
  %n1 = stablehlo.subtract %w1, %g1 : tensor<64x64xf32>
  return %n0, %n1 : tensor<64x64xf32>, tensor<64x64xf32>
}
"""
CUT = (
    "simplify-trivial-ops,layer-cluster{num-layers=2},"
    "stage-mesh-partition{cluster=cpu:1x4 num-stages=2 num-micro-batches=3}"
)
WEIGHT, BATCH = 64 * 64 * 4, 8 * 64 * 4


@pytest.fixture(scope="module")
def report() -> PlanReport:
    rest = ",ilp-shard-annotate{intra=data-parallel},insert-cross-mesh-reshard"
    return PlanReport.of(passes.run(PROGRAM, CUT + rest))


def test_stages(report: PlanReport) -> None:
    first, last = report.stages
    assert (first.mesh, first.layers) == ("mesh_0", ("layer_0",))
    assert (last.mesh, last.layers) == ("mesh_1", ("layer_1",))
    for stage in report.stages:
        assert stage.forward_seconds > 0
        assert stage.backward_seconds > 0
        assert stage.state_bytes == WEIGHT  # replicated under data parallelism
        assert stage.parameter_bytes == (WEIGHT, WEIGHT)
        assert stage.optimizer_bytes == (0, 0)
        assert stage.splits == "batch on axis0"
        assert stage.strategy == "batch on axis0; a device holds all the parameters"
    # tanh belongs to the second layer, whose backward reads its result and y; half of the samples.
    assert first.activation_bytes == 0
    assert last.activation_bytes == 2 * (BATCH // 2)


def test_transfers_are_per_micro_batch(report: PlanReport) -> None:
    assert [(t.source, t.target, t.per, t.bytes) for t in report.transfers] == [
        ("mesh_0", "mesh_1", "micro-batch", BATCH),
        ("mesh_1", "mesh_0", "micro-batch", BATCH),
    ]
    assert all(t.method for t in report.transfers)


def test_gradients_are_reduced_on_each_mesh(report: PlanReport) -> None:
    reductions = [c for c in report.collectives if c.bytes == WEIGHT]
    assert {c.mesh for c in reductions} == {"mesh_0", "mesh_1"}
    assert {(c.kind, c.axis) for c in reductions} == {("all-reduce", "axis0")}
    # Once in the update, or with each of the three micro-batches.
    assert {c.count for c in reductions} <= {1, 3}


def test_the_json_has_its_documented_entries(report: PlanReport) -> None:
    plan = json.loads(report.searched({"one": 1.5, "two": 0.5}).to_json())
    assert plan["search_seconds"] == 2.0
    assert plan["phases"] == {"one": 1.5, "two": 0.5}
    assert plan["num_micro_batches"] == 3
    assert plan["schedule"] == "gpipe"
    assert plan["predicted_step_seconds"] == report.predicted_step_seconds
    assert len(plan["predicted_peak_bytes"]) == 2
    assert {"status", "objective", "bound", "gap", "variables"} <= plan["solver"].keys()
    assert plan["meshes"][1] == {
        "name": "mesh_1",
        "hosts": [0],
        "devices": [2, 3],
        "logical_shape": [2],
        "device": "",
    }
    names = {"mesh", "layers", "forward_seconds", "backward_seconds"}
    assert names | {"state_bytes", "activation_bytes"} <= plan["stages"][0].keys()
    assert plan["transfers"][0]["from"] == "mesh_0"
    assert plan["transfers"][0]["to"] == "mesh_1"
    assert {"mesh", "kind", "axis", "bytes", "count"} <= plan["collectives"][0].keys()


def test_before_shardings_are_chosen() -> None:
    report = PlanReport.of(passes.run(PROGRAM, CUT))
    assert report.solver is None
    assert report.collectives == ()
    assert {stage.strategy for stage in report.stages} == {""}
    assert {transfer.method for transfer in report.transfers} == {None}


def solved(objective: float, bound: float, status: str) -> SolverReport:
    return SolverReport(
        mesh="m",
        intra="auto",
        status=status,
        objective=objective,
        bound=bound,
        variables=7,
        peak_bytes=1,
    )


@pytest.mark.parametrize("dim", [2, -1])
def test_an_invalid_batch_dimension_is_refused(dim: int) -> None:
    planned = str(passes.run(PROGRAM, f"{CUT},ilp-shard-annotate"))
    assert "alpa.batch_dim = 0" in planned
    broken = passes.run(planned.replace("alpa.batch_dim = 0", f"alpa.batch_dim = {dim}"), "cse")
    with pytest.raises(PassError, match=rf"batch_dim below its rank of 2; it has {dim}$"):
        PlanReport.of(broken)


def test_the_solver_knows_as_little_as_of_its_worst_mesh() -> None:
    summary = SolverSummary.of((solved(1.0, 1.0, "optimal"), solved(3.0, 2.0, "time_limit")))
    assert summary is not None
    assert (summary.status, summary.objective, summary.bound) == ("time_limit", 4.0, 3.0)
    assert (summary.gap, summary.variables) == (0.25, 14)


def test_json_has_no_infinities(report: PlanReport) -> None:
    text = report.searched({"forever": float("inf")}).to_json()
    assert json.loads(text)["phases"] == {"forever": None}


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"a": {"batch": 9}}, "batch on a"),
        ({"a": {"batch": 9}, "b": {"batch": 9}}, "batch on a and b"),
        ({"a": {"batch": 9}, "b": {"hidden": 9}}, "batch on a, hidden on b"),
        ({"a": {"hidden": 95, "nothing": 5}}, "hidden on a"),
        ({"a": {"hidden": 60, "heads": 40}}, "hidden (60%) or heads (40%) on a"),
        (
            {"a": {"nothing": 9}, "b": {"batch": 9}},
            "batch on b, nothing on a, whose devices repeat one another's work",
        ),
        ({}, ""),
    ],
)
def test_splits_in_words(splits: dict[str, dict[str, int]], words: str) -> None:
    assert in_words({axis: Counter(counts) for axis, counts in splits.items()}) == words


def test_the_margin_is_stated_for_gpus() -> None:
    def planned(cluster: str) -> ir.Module:
        return passes.run(PROGRAM, f"alpa{{cluster={cluster} num-stages=1}}")

    module = planned("h100:1x1")
    assert json.loads(PlanReport.of(module).to_json())["memory_margin"] == MEMORY_MARGIN
    assert "XLA may need up to 10% more than predicted" in plan_table(module)
    module = planned("cpu:1x1")
    assert PlanReport.of(module).memory_margin is None
    assert "XLA may need" not in plan_table(module)


def test_a_layer_with_a_split_backward_is_rematerialised_once() -> None:
    program = zoo.get("gpt-tiny", num_layers=2).lower(1)
    options = "cluster=cpu:1x2 mesh-shape=1 num-stages=2 num-layers=4 num-micro-batches=4"
    planned = passes.run(program, f"alpa{{{options} schedule=zb-h1 remat=layer}}")
    report = PlanReport.of(planned)
    expected = [("layer_0", "layer_1"), ("layer_2", "layer_3")]
    assert [stage.remat for stage in report.stages] == expected
    assert "stage 1: remat: layers 2-3" in plan_table(planned, report).splitlines()
