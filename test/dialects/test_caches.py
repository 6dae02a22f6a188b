from __future__ import annotations

import gc
from typing import Any, cast

import alpa.passes
from alpa.dialects import ir, parse
from alpa.dialects.caches import cached, forget
from alpa.passes.plan.report import PlanReport

PROGRAM = """\
func.func public @main(%w: tensor<8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
  return %y : tensor<4x8xf32>
}
"""


def living() -> int:
    """How many contexts there are."""
    gc.collect()
    return cast(Any, ir.Context)._get_live_count()


def test_runs_leave_no_context_behind() -> None:
    before = living()
    for _ in range(3):
        alpa.passes.run(PROGRAM, "alpa{cluster=cpu:1x2 processes=0}")
        assert living() <= before


def test_what_is_read_of_plans_keeps_one_context_at_most() -> None:
    before = living()
    for _ in range(4):
        PlanReport.of(alpa.passes.run(PROGRAM, "alpa{cluster=cpu:1x2 processes=0}"))
    assert living() <= before + 1
    forget()
    assert living() <= before


def test_results_are_kept_until_they_are_forgotten() -> None:
    asked: list[ir.Type] = []

    @cached
    def width(type_: ir.Type) -> int:
        asked.append(type_)
        return ir.RankedTensorType(type_).rank

    module = parse("module {}")
    with module.context:
        vector = ir.Type.parse("tensor<4xf32>")
        assert [width(vector), width(ir.Type.parse("tensor<4xf32>"))] == [1, 1]
        assert len(asked) == 1
        forget()
        assert width(vector) == 1
    assert len(asked) == 2
