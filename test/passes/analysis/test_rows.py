"""Which dimensions of operands and results have the same rows, op by op."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse
from alpa.passes.analysis.rows import operand_dims, unchanged_dims

ADD = "stablehlo.add %x, %x : tensor<4x3xf32>"
SCALED = "chlo.broadcast_multiply %x, %s : (tensor<4x3xf32>, tensor<f32>) -> tensor<4x3xf32>"
TRANSPOSE = "stablehlo.transpose %x, dims = [1, 0] : (tensor<4x3xf32>) -> tensor<3x4xf32>"
STACK = "stablehlo.broadcast_in_dim %x, dims = [1, 2] : (tensor<4x3xf32>) -> tensor<2x4x3xf32>"
GROW = "stablehlo.broadcast_in_dim %y, dims = [0, 1] : (tensor<1x3xf32>) -> tensor<4x3xf32>"
SUM = (
    "stablehlo.reduce(%x init: %s) applies stablehlo.add across dimensions = [0] : "
    "(tensor<4x3xf32>, tensor<f32>) -> tensor<3xf32>"
)
MERGE = "stablehlo.reshape %z : (tensor<4x2x3xf32>) -> tensor<4x6xf32>"
REVERSE = "stablehlo.reverse %x, dims = [0] : tensor<4x3xf32>"
ONES = "stablehlo.constant dense<1.0> : tensor<4xf32>"
COUNT = "stablehlo.constant dense<[1.0, 2.0]> : tensor<2xf32>"
COLUMNS = 'sdy.sharding_constraint %x <@m, [{?}, {"a"}]> : tensor<4x3xf32>'
COMPLEX = "stablehlo.constant dense<(1.0, 2.0)> : tensor<2xcomplex<f32>>"


@pytest.mark.parametrize(
    ("op", "dim", "expected"),
    [
        (ADD, 1, [1, 1]),
        (SCALED, 0, [0, None]),
        (TRANSPOSE, 0, [1]),
        (STACK, 2, [1]),
        (STACK, 0, [None]),
        (GROW, 0, [None]),
        (GROW, 1, [1]),
        (SUM, 0, [1, None]),
        (MERGE, 0, [0]),
        (MERGE, 1, None),
        (REVERSE, 1, None),
        (ONES, 0, []),
        (COUNT, 0, None),
        (COMPLEX, 0, None),
        (COLUMNS, 0, [0]),
        (COLUMNS, 1, None),
    ],
)
def test_dimensions_of_operands(op: str, dim: int, expected: list[int | None] | None) -> None:
    arguments = "%x: tensor<4x3xf32>, %y: tensor<1x3xf32>, %z: tensor<4x2x3xf32>, %s: tensor<f32>"
    mesh = 'sdy.mesh @m = <["a"=1]>'
    module = parse(f"{mesh}\nfunc.func @main({arguments}) {{ %0 = {op} return }}")
    assert operand_dims(body(main_function(module)).operations[0], dim) == expected


def test_a_reshape_leaves_dimensions_alone_that_have_as_much_before_them() -> None:
    assert unchanged_dims((4, 2, 3), (4, 6)) == {0: 0}
    assert unchanged_dims((4, 2, 3), (2, 2, 2, 3)) == {1: 2, 2: 3}
    assert unchanged_dims((4, 1, 3), (1, 4, 3)) == {0: 1, 2: 2}
    assert unchanged_dims((6,), (2, 3)) == {}
