"""PLAN.json is as its schema says, which describes each of its entries."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator

from alpa import passes
from alpa.dialects.attributes import Part
from alpa.dialects.plan import AccumulateDtype, Dropped, MeshAssignment, SolverReport
from alpa.passes.plan.report import (
    CollectiveReport,
    PlanReport,
    SolverSummary,
    StageReport,
)
from alpa.passes.plan.transfer_report import Per, TransferReport
from alpa.passes.tried import PlanOutcome, SubmeshOutcome, Tried, TriedPlan, TriedSubmesh
from test.schemas import read_schema, undescribed

SCHEMA = read_schema("alpa.passes.plan", "plan.schema.json")
VALIDATOR = Draft202012Validator(SCHEMA)
PARTS = {
    "dropped": Dropped,
    "tried": Tried,
    "tried_submesh": TriedSubmesh,
    "tried_plan": TriedPlan,
    "solver": SolverSummary,
    "solved": SolverReport,
    "mesh": MeshAssignment,
    "stage": StageReport,
    "transfer": TransferReport,
    "collective": CollectiveReport,
}
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
CUT = "simplify-trivial-ops,layer-cluster{num-layers=2},stage-mesh-partition{num-stages=2"


def names(part: type) -> set[str]:
    """The entries of a part of PLAN.json."""
    given = {"source": "from", "target": "to"}
    found = {given.get(it.name, it.name) for it in fields(part)}
    return found | {name for name, it in vars(part).items() if isinstance(it, property)}


def unknown(value: Any, schema: Any, path: str = "") -> list[str]:
    """The places of entries that the schema does not have."""
    for one in [schema, *schema.get("anyOf", [])]:
        if "$ref" in one:
            schema = SCHEMA["$defs"][one["$ref"].removeprefix("#/$defs/")]
    if isinstance(value, list):
        return [place for it in value for place in unknown(it, schema["items"], path)]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    return [f"{path}/{key}" for key in value if key not in known] + [
        place
        for key in value
        if key in known
        for place in unknown(value[key], known[key], f"{path}/{key}")
    ]


def test_all_is_described() -> None:
    assert list(undescribed(SCHEMA)) == []
    bare = {"type": ["integer", "null"]}
    entries = {"a": {"type": "array", "items": {"properties": {"b": bare}}}}
    assert list(undescribed({"properties": entries})) == [
        "/a: description",
        "/a/items/b: description",
        "/a/items/b: unit",
    ]


@pytest.mark.parametrize("part", PARTS)
def test_every_entry_is_in_the_schema(part: str) -> None:
    entries = SCHEMA["$defs"][part]
    assert {*entries["properties"]} == {*entries["required"]} == names(PARTS[part])


def test_every_entry_of_the_plan_is_in_the_schema() -> None:
    """A new field of PlanReport needs an entry, with a description and a unit."""
    assert {*SCHEMA["required"]} == {it.name for it in fields(PlanReport)}
    assert {*SCHEMA["properties"]} == {*SCHEMA["required"], "verification"}


def test_the_same_words() -> None:
    parts = SCHEMA["$defs"]
    for entry, kind in (
        (SCHEMA["properties"]["accumulate_dtype"], AccumulateDtype),
        (parts["transfer"]["properties"]["per"], Per),
        (parts["collective"]["properties"]["part"], Part),
        (parts["tried_submesh"]["properties"]["outcome"], SubmeshOutcome),
        (parts["tried_plan"]["properties"]["outcome"], PlanOutcome),
    ):
        assert tuple(entry["enum"]) == get_args(kind)


@pytest.mark.parametrize(
    "pipeline",
    [
        "alpa{cluster=cpu:2x2 num-stages=2 num-layers=2 num-micro-batches=3}",
        "alpa{cluster=cpu:1x4 num-layers=2 intra=data-parallel num-stages=1}",
        "alpa{cluster=h100:1x4 num-layers=2 num-micro-batches=2 schedule=gpipe remat=layer}",
        "alpa{cluster=v100-16gb:1x2+a100-40gb:1x2 num-layers=2 num-stages=2}",
        f"{CUT} cluster=cpu:1x4}}",
    ],
)
def test_plans(pipeline: str) -> None:
    report = PlanReport.of(passes.run(PROGRAM, pipeline)).searched({"parse": 0.5})
    plan = json.loads(report.to_json())
    VALIDATOR.validate(plan)
    assert unknown(plan, SCHEMA) == []


def test_wrong_plans() -> None:
    report = PlanReport.of(passes.run(PROGRAM, f"{CUT} cluster=cpu:1x4}}"))
    plan = json.loads(report.to_json())
    assert VALIDATOR.is_valid(plan)
    assert not VALIDATOR.is_valid(plan | {"predicted_step_seconds": "1 s"})
    assert not VALIDATOR.is_valid(plan | {"stages": [{"mesh": "mesh_0"}]})
    assert not VALIDATOR.is_valid({key: plan[key] for key in plan if key != "meshes"})
    assert unknown(plan | {"zebra": 1}, SCHEMA) == ["/zebra"]
