"""Whether an op multiplies what is made of two values, inside loops and branches, too."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse
from alpa.passes.analysis.products import multiplies

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
    # Squares at first; `a` and `b` of the second trip are made of one and the other.
    "a loop of squares that swaps": (LOOP.format("stablehlo.multiply %a, %a", "%b, %c"), False),
    "a loop that reads from outside": (LOOP.format("stablehlo.multiply %a, %y", "%c, %b"), True),
    "a branch of products": (CASE.format("stablehlo.multiply %x, %y"), True),
    "a branch of sums": (CASE.format("stablehlo.add %x, %y"), False),
}


@pytest.mark.parametrize("case", CASES)
def test_two_factors_of_different_values(case: str) -> None:
    text, expected = CASES[case]
    arguments = ", ".join(f"%{name}: tensor<4xf32>" for name in "xyz")
    module = parse(f"func.func @main({arguments}) {{\n{text}\nreturn\n}}")
    block = body(main_function(module))
    *_, op, _return = block.operations
    x, y, _z = block.arguments
    assert multiplies(op, {x: 1, y: 2}) is expected
