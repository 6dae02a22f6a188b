"""The numbers of masks are those that the program computes, or none."""

from __future__ import annotations

import numpy as np
import pytest

from alpa.dialects import body, main_function, parse, terminator
from alpa.passes.analysis.tokens.numbers import Numbers


def numbers(ops: str, type_: str) -> np.ndarray | None:
    module = parse(f"func.func @main() -> {type_} {{\n{ops}\nreturn %r : {type_}\n}}")
    with module.context:
        return Numbers({}).of(terminator(body(main_function(module))).operands[0])


@pytest.mark.parametrize("element", ["i32", "ui32", "f16", "bf16", "f32", "f64"])
def test_numbers_that_a_type_has(element: str) -> None:
    type_ = f"tensor<4x{element}>"
    ops = f"%i = stablehlo.iota dim = 0 : {type_}\n%r = stablehlo.add %i, %i : {type_}"
    found = numbers(ops, type_)
    assert found is not None
    assert found.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("element", "size"), [("bf16", 258), ("f16", 2050), ("i8", 129), ("ui8", 257)]
)
def test_positions_that_a_type_rounds_or_wraps(element: str, size: int) -> None:
    for count, is_known in ((size - 1, True), (size, False)):
        type_ = f"tensor<{count}x{element}>"
        assert (numbers(f"%r = stablehlo.iota dim = 0 : {type_}", type_) is not None) == is_known


@pytest.mark.parametrize("element", ["ui8", "ui32", "ui64"])
def test_a_difference_that_wraps(element: str) -> None:
    """0 - 1 is the largest number of an unsigned type."""
    type_ = f"tensor<4x{element}>"
    ops = (
        f"%i = stablehlo.iota dim = 0 : {type_}\n%c = stablehlo.constant dense<1> : {type_}\n"
        f"%r = stablehlo.subtract %i, %c : {type_}"
    )
    assert numbers(ops, type_) is None


def test_infinity_is_no_integer() -> None:
    ops = (
        "%c = stablehlo.constant dense<0xFF800000> : tensor<4xf32>\n"
        "%r = stablehlo.convert %c : (tensor<4xf32>) -> tensor<4xi64>"
    )
    assert numbers(ops, "tensor<4xi64>") is None
