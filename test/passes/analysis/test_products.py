"""Whether an op multiplies values that depend on two given ones, also inside loops and branches."""

from __future__ import annotations

import pytest

from alpa.dialects import body, ir, main_function, parse
from alpa.passes.analysis.products import is_linear, multiplies

LOOP = """
%start = stablehlo.constant dense<0> : tensor<i32>
%0:3 = stablehlo.while(%i = %start, %a = %x, %b = %y) : tensor<i32>, tensor<4xf32>, tensor<4xf32>
cond {{
  %trips = stablehlo.constant dense<3> : tensor<i32>
  %more = stablehlo.compare LT, %i, %trips : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %more : tensor<i1>
}} do {{
  %one = stablehlo.constant dense<1> : tensor<i32>
  %next = stablehlo.add %i, %one : tensor<i32>
  %c = {} : tensor<4xf32>
  stablehlo.return %next, {} : tensor<i32>, tensor<4xf32>, tensor<4xf32>
}}
"""
CASE = """
%which = stablehlo.constant dense<0> : tensor<i32>
%0 = "stablehlo.case"(%which) ({{
  stablehlo.return %x : tensor<4xf32>
}}, {{
  %a = {} : tensor<4xf32>
  stablehlo.return %a : tensor<4xf32>
}}) : (tensor<i32>) -> tensor<4xf32>
"""
CASES = {
    "the product of two values": ("%0 = stablehlo.multiply %x, %y : tensor<4xf32>", True),
    "the sum of two values": ("%0 = stablehlo.add %x, %y : tensor<4xf32>", False),
    "a square": ("%0 = stablehlo.multiply %x, %x : tensor<4xf32>", False),
    "a product with a value of neither": ("%0 = stablehlo.multiply %x, %z : tensor<4xf32>", False),
    "a loop of products": (LOOP.format("stablehlo.multiply %a, %b", "%c, %b"), True),
    "a loop of sums": (LOOP.format("stablehlo.add %a, %b", "%c, %b"), False),
    # The first trip squares; in the second `a` and `b` each depend on one of the two.
    "a loop of squares that swaps": (LOOP.format("stablehlo.multiply %a, %a", "%b, %c"), False),
    "a loop that reads from outside": (LOOP.format("stablehlo.multiply %a, %y", "%c, %b"), True),
    "a branch of products": (CASE.format("stablehlo.multiply %x, %y"), True),
    "a branch of sums": (CASE.format("stablehlo.add %x, %y"), False),
}


# x and y vary, z does not.
LINEAR = {
    **{case: (text, not found) for case, (text, found) in CASES.items()},
    "a square": (CASES["a square"][0], False),
    "a loop of squares that swaps": (CASES["a loop of squares that swaps"][0], False),
    "a divisor": ("%0 = stablehlo.divide %z, %x : tensor<4xf32>", False),
    "a dividend": ("%0 = stablehlo.divide %x, %z : tensor<4xf32>", True),
    "one over itself": ("%0 = stablehlo.divide %x, %x : tensor<4xf32>", False),
    "a function": ("%0 = stablehlo.tanh %x : tensor<4xf32>", False),
    "a function of what does not vary": ("%0 = stablehlo.tanh %z : tensor<4xf32>", True),
    "a branch of a function": (CASE.format("stablehlo.tanh %x : tensor<4xf32> //"), False),
    "a choice": (
        "%0 = stablehlo.select %p, %x, %y : (tensor<4xi1>, tensor<4xf32>, tensor<4xf32>) -> "
        "tensor<4xf32>",
        True,
    ),
    "a choice by what varies": (
        "%1 = stablehlo.select %q, %z, %z : (tensor<4xi1>, tensor<4xf32>, tensor<4xf32>) -> "
        "tensor<4xf32>",
        False,
    ),
    "another shape": ("%0 = stablehlo.reshape %x : (tensor<4xf32>) -> tensor<2x2xf32>", True),
}


def module_of(text: str) -> ir.Module:
    """A function of three rows of numbers and two conditions."""
    given = [*(f"%{name}: tensor<4xf32>" for name in "xyz"), "%p: tensor<4xi1>", "%q: tensor<4xi1>"]
    return parse(f"func.func @main({', '.join(given)}) {{\n{text}\nreturn\n}}")


def last_op(module: ir.Module) -> tuple[ir.OpView, list[ir.Value]]:
    """The arguments of `function`."""
    block = body(main_function(module))
    *_, op, _return = block.operations
    return op, list(block.arguments)


@pytest.mark.parametrize("case", CASES)
def test_two_factors_of_different_values(case: str) -> None:
    text, expected = CASES[case]
    module = module_of(text)
    op, (x, y, *_) = last_op(module)
    assert multiplies(op, {x: 1, y: 2}) is expected


@pytest.mark.parametrize("case", LINEAR)
def test_linear_in_what_varies(case: str) -> None:
    text, expected = LINEAR[case]
    module = module_of(text)
    op, (x, y, _z, _p, q) = last_op(module)
    assert is_linear(op, {x, y, q}) is expected
