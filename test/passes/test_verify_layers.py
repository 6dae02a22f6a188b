"""`verify-layers` on plans with one planted fault each, and on correct plans."""

from __future__ import annotations

from collections import Counter

import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function
from alpa.passes import PassError
from alpa.passes.analysis.graph import Graph
from alpa.passes.plan.layer_checks import check_placed_once, placed_ops
from alpa.tools import zoo

# Two layers share a parameter; each computes its part of the gradient, and the update adds them up.
TIED = """
func.func public @main(%w: tensor<8x8xf32> {alpa.role = "state"},
                       %x: tensor<8x8xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<8x8xf32> {alpa.result = "concat:0"}, tensor<8x8xf32> {alpa.result = "state:0"}) {
  %0 = stablehlo.multiply %x, %w : tensor<8x8xf32>
  %1 = stablehlo.multiply %0, %w : tensor<8x8xf32>
  %2 = stablehlo.multiply %1, %0 : tensor<8x8xf32>
  %3 = stablehlo.multiply %1, %w : tensor<8x8xf32>
  %4 = stablehlo.multiply %3, %x : tensor<8x8xf32>
  %5 = stablehlo.add %2, %4 : tensor<8x8xf32>
  %6 = stablehlo.subtract %w, %5 : tensor<8x8xf32>
  return %1, %6 : tensor<8x8xf32>, tensor<8x8xf32>
}
"""


@pytest.fixture(scope="module")
def planned() -> str:
    stages = "stage-mesh-partition{cluster=cpu:1x2 num-stages=2}"
    return str(passes.run(TIED, f"simplify-trivial-ops,layer-cluster{{num-layers=2}},{stages}"))


def exchanged(text: str, one: str, other: str) -> str:
    return text.replace(one, "<>").replace(other, one).replace("<>", other)


def test_a_plan_passes_and_stays_unchanged(planned: str) -> None:
    assert str(passes.run(planned, "verify-layers")) == planned


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'origin=["update_0"], stage=0>',
            'origin=["update_1"], stage=0>',
            "update_1 is on mesh_0, the layer's forward on mesh_1: its parameters and activations",
        ),
        (
            'alpa.part = "update"',
            'alpa.part = "backward"',
            "update_0 is update and in a backward fragment",
        ),
        ('origin=["layer_1"(1)]', 'origin=["layer_0"(1)]', "layer_0(1) is there twice"),
        ('origin=["layer_1"]', 'origin=["stem"]', "stem is no layer: expected layer_<number>"),
        (
            'tensor<8x8xf32>> {alpa.output = 1 : i64, alpa.result = "state:0"}) attributes',
            'tensor<8x8xf32>> {alpa.output = 1 : i64, alpa.result = "last"}) attributes',
            "argument 1 is the copy on mesh_1 of state 0, whose new value is returned on mesh_0",
        ),
    ],
)
def test_faults_in_a_plan(planned: str, old: str, new: str, message: str) -> None:
    assert planned.count(old) == 1
    with pytest.raises(ir.MLIRError) as error:
        passes.run(planned.replace(old, new), "verify-layers")
    assert message in str(error.value)


def test_stages_that_are_no_intervals_in_order(planned: str) -> None:
    text = exchanged(planned, '"layer_0"', '"layer_1"').replace("update_0", "update_1")
    message = "layer_1 is in stage 0 on mesh_0, and layer_0 before it in stage 1 on mesh_1"
    with pytest.raises(ir.MLIRError, match=message):
        passes.run(text, "verify-layers")


def test_every_op_is_placed_once() -> None:
    module = passes.run(zoo.get("gpt-tiny", num_layers=1).lower(1), "simplify-trivial-ops")
    before = placed_ops(Graph.of(body(main_function(module))).ops)
    passes.run(module, "layer-cluster{num-layers=2}")
    function = main_function(module)
    check_placed_once(before, function)
    lost = before + Counter(["stablehlo.dot_general"])
    with pytest.raises(PassError, match=r"21 stablehlo\.dot_general ops are in layers, 22 in the"):
        check_placed_once(lost, function)
    repeated = before - Counter(["stablehlo.gather"])
    with pytest.raises(PassError, match=r"1 stablehlo\.gather ops are in layers, 0 in the program"):
        check_placed_once(repeated, function)
