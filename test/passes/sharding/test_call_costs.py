"""Registered costs of custom calls reach the plan; wrong ones are errors at the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import alpa.passes
from alpa.dialects import ir, main_function, parse, stablehlo, walk
from alpa.dialects.plan import Plan
from alpa.passes import CallCost, register_cost
from alpa.passes.analysis import op_cost
from alpa.passes.pipelines.diagnostics import place_of
from alpa.passes.sharding.call_costs import CUSTOM_CALL_COSTS

PROGRAM = """\
func.func @main(%x: tensor<64x8xf32>, %w: tensor<8x8xf32>) -> tensor<64x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
  %1 = stablehlo.custom_call @my.kernel(%0) : (tensor<64x8xf32>) -> tensor<64x8xf32>
  return %1 : tensor<64x8xf32>
}
"""


@pytest.fixture
def target() -> Iterator[str]:
    yield "my.kernel"
    CUSTOM_CALL_COSTS.pop("my.kernel", None)


def with_attribute(text: str) -> str:
    return PROGRAM.replace("@my.kernel(%0)", f"@my.kernel(%0) {{alpa.cost = {text}}}")


def call_of(module: ir.Module) -> ir.OpView:
    (call,) = (op for op in walk(module.body) if isinstance(op, stablehlo.CustomCallOp))
    return call


def step_seconds(program: str) -> float:
    module = alpa.passes.run(program, "alpa{cluster=cpu:1x1}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    return plan.predicted_step_seconds


def test_a_cost_makes_the_predicted_step_longer(target: str) -> None:
    before = step_seconds(PROGRAM)
    register_cost(target, lambda op: CallCost(flops=1e12))
    assert step_seconds(PROGRAM) > before + 1
    register_cost(target, CallCost(flops=0.0, bytes=1e12))
    assert step_seconds(PROGRAM) > before + 1


def test_the_attribute_says_the_same() -> None:
    given = with_attribute("{flops = 1.0e12 : f64}")
    assert step_seconds(given) > step_seconds(PROGRAM) + 1


def test_a_function_sees_the_call_and_bytes_may_be_left_out(target: str) -> None:
    register_cost(target, lambda op: CallCost(flops=float(op.operands[0].type.shape[0])))
    module = alpa.passes.run(PROGRAM, "simplify-trivial-ops")
    call = call_of(module)
    assert (op_cost.flops(call), op_cost.memory_bytes(call)) == (64.0, 2 * 64 * 8 * 4)


def test_a_call_keeps_its_own_cost_and_others_have_none(target: str) -> None:
    register_cost(target, CallCost(flops=1.0))
    own = with_attribute("{flops = 2.0 : f64, bytes = 3.0 : f64}")
    call = call_of(alpa.passes.run(own, "simplify-trivial-ops"))
    assert (op_cost.flops(call), op_cost.memory_bytes(call)) == (2.0, 3.0)
    other = alpa.passes.run(PROGRAM.replace("@my.kernel", "@other"), "simplify-trivial-ops")
    assert CallCost.read(call_of(other)) is None


def test_the_modules_for_xla_do_not_have_it(target: str) -> None:
    register_cost(target, CallCost(flops=1.0))
    module = alpa.passes.run(PROGRAM, "alpa{cluster=cpu:1x1},export-stages")
    texts = [str(op) for op in module.body if op.operation.name == "builtin.module"]
    assert texts
    assert not any("alpa.cost" in text for text in texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7 : i64", "alpa.cost is 7 : i64; expected a dictionary"),
        ("{}", "there is no flops of alpa.cost; expected a floating-point number"),
        ("{flops = 1 : i64}", "flops of alpa.cost is 1 : i64; expected a floating-point number"),
        ("{flops = -1.0 : f64}", "flops of alpa.cost is -1.0; expected a finite number"),
        ("{flops = 1.0, bytes = 0x7FF0000000000000 : f64}", "bytes of alpa.cost is inf; expected"),
    ],
)
@pytest.mark.parametrize("name", ["simplify-trivial-ops", "layer-cluster", "alpa{cluster=cpu:1x1}"])
def test_a_wrong_attribute_is_an_error_at_the_call(text: str, message: str, name: str) -> None:
    with pytest.raises(ir.MLIRError) as caught:
        alpa.passes.run(parse(with_attribute(text)), name)
    (found,) = caught.value.error_diagnostics
    assert found.message.startswith(message)
    assert place_of(found.location).line == 4


def test_what_a_function_raises_is_named_at_its_call(target: str) -> None:
    def boom(op: ir.OpView) -> CallCost:
        raise KeyError("boom")

    register_cost(target, boom)
    pattern = r"the cost registered for @my.kernel: KeyError: 'boom' \(.*test_call_costs.py:\d+\)"
    with pytest.raises(ir.MLIRError, match=pattern):
        alpa.passes.run(PROGRAM, "simplify-trivial-ops")
    register_cost(target, lambda op: 7.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ir.MLIRError, match=r"TypeError: what it returns is 7\.0"):
        alpa.passes.run(PROGRAM, "simplify-trivial-ops")


def test_what_is_no_cost_is_refused(target: str) -> None:
    with pytest.raises(TypeError, match="cost is 7"):
        register_cost(target, 7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="target is None"):
        register_cost(None, CallCost(flops=1.0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"flops of alpa\.cost is nan"):
        CallCost(flops=float("nan"))
    assert target not in CUSTOM_CALL_COSTS
