"""`alpa.plan`, and the types in which a plan accumulates over the micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import Plan

MAIN = "func.func public @main() attributes {alpa.plan = %s} { return }"


@pytest.mark.parametrize(
    ("dtype", "f32", "f64"),
    [
        ("f8E4M3FN", "f32", "f64"),
        ("f16", "f32", "f64"),
        ("bf16", "f32", "f64"),
        ("f32", "f32", "f64"),
        ("f64", "f64", "f64"),
        ("complex<f32>", "complex<f32>", "complex<f64>"),
        ("complex<f64>", "complex<f64>", "complex<f64>"),
        ("i8", "i8", "i8"),
        ("ui32", "ui32", "ui32"),
        ("i1", "i1", "i1"),
    ],
)
def test_sums_are_of_wide_types(dtype: str, f32: str, f64: str) -> None:
    assert Plan().accumulator(dtype) == f32
    assert Plan(accumulate_dtype="f64").accumulator(dtype) == f64
    assert Plan(accumulate_dtype="same").accumulator(dtype) == dtype


@pytest.mark.parametrize("accumulate_dtype", ["f32", "f64", "same"])
def test_a_plan_is_read_as_it_was_written(accumulate_dtype: Any) -> None:
    plan = Plan(num_micro_batches=3, accumulate_dtype=accumulate_dtype)
    module = parse(MAIN % "{}")
    with module.context, ir.Location.unknown():
        plan.write(main_function(module))
    written = ir.DictAttr(main_function(module).attributes["alpa.plan"])
    assert ("accumulate_dtype" in written) == (accumulate_dtype != "f32")
    assert Plan.read(main_function(module)) == plan


def test_a_type_that_there_is_not() -> None:
    text = (
        '{accumulate_dtype = "f16", num_micro_batches = 2 : i64, schedule = "gpipe", '
        "predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}"
    )
    with pytest.raises(ValueError, match='accumulate_dtype is "f16"; expected one of f32, f64, s'):
        Plan.read(main_function(parse(MAIN % text)))
