"""What a compiler that fuses reads and writes, op by op."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse
from alpa.passes.analysis import op_work

X = 4 * 64 * 64
"""bytes of the f32 matrices below"""
ROW, SCALAR = 4 * 64, 4

HEAD = "func.func public @main(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>, %r: tensor<64xf32>)"
SUM = "applies stablehlo.add across dimensions"
MAX = "applies stablehlo.maximum across dimensions"


def works(ops: str, results: str = "64x64xf32") -> list[op_work.Work]:
    text = f"""{HEAD} -> tensor<{results}> {{
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      {ops}
      return %out : tensor<{results}>
    }}"""
    return op_work.fused(body(main_function(parse(text))))


def moved(ops: str, results: str = "64x64xf32") -> tuple[float, float]:
    """Bytes and kernels of a program."""
    _, num_bytes, kernels = op_work.total(works(ops, results))
    return num_bytes, kernels


def unary(name: str, out: str, operand: str, type_: str = "64x64xf32") -> str:
    return f"%{out} = stablehlo.{name} %{operand} : tensor<{type_}>\n"


def binary(name: str, out: str, *operands: str) -> str:
    listed = ", ".join(f"%{operand}" for operand in operands)
    return f"%{out} = stablehlo.{name} {listed} : tensor<64x64xf32>\n"


def reduce(kind: str, out: str, operand: str, dim: int) -> str:
    return (
        f"%{out} = stablehlo.reduce(%{operand} init: %zero) {kind} = [{dim}] : "
        "(tensor<64x64xf32>, tensor<f32>) -> tensor<64xf32>\n"
    )


def spread(out: str, operand: str, dim: int) -> str:
    return (
        f"%{out} = stablehlo.broadcast_in_dim %{operand}, dims = [{dim}] : "
        "(tensor<64xf32>) -> tensor<64x64xf32>\n"
    )


def dot(out: str, left: str, right: str) -> str:
    return (
        f"%{out} = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0] : "
        "(tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>\n"
    )


def softmax(operand: str, out: str, dim: int = 1) -> str:
    """Along the rows, or with dim = 0 along the columns."""
    other = 1 - dim
    return (
        reduce(MAX, "m", operand, dim)
        + spread("mm", "m", other)
        + binary("subtract", "s", operand, "mm")
        + unary("exponential", "e", "s")
        + reduce(SUM, "t", "e", dim)
        + spread("tt", "t", other)
        + binary("divide", out, "e", "tt")
    )


@pytest.mark.parametrize(
    ("ops", "num_bytes", "kernels"),
    [
        (unary("tanh", "a", "x") + unary("tanh", "out", "a"), 2 * X, 1),
        (softmax("x", "out"), 2 * X, 1),
        # The columns' largest are known when all of x was read; their sums when it was read twice.
        (softmax("x", "out", dim=0), 4 * X + 5 * ROW, 3),
        # A mask is computed where it is read.
        (
            "%i = stablehlo.iota dim = 0 : tensor<64x64xf32>\n"
            "%j = stablehlo.iota dim = 1 : tensor<64x64xf32>\n"
            "%p = stablehlo.compare GE, %i, %j : (tensor<64x64xf32>, tensor<64x64xf32>) -> "
            "tensor<64x64xi1>\n"
            "%out = stablehlo.select %p, %x, %w : tensor<64x64xi1>, tensor<64x64xf32>\n",
            3 * X,
            1,
        ),
        (spread("b", "r", 1) + binary("add", "out", "x", "b"), 2 * X + ROW, 1),
        (dot("out", "x", "w"), 3 * X, 1),
        (dot("a", "x", "w") + unary("tanh", "out", "a"), 5 * X, 2),
        # Contractions read transposed operands; others are copied.
        (
            "%t = stablehlo.transpose %w, dims = [1, 0] : (tensor<64x64xf32>) -> "
            "tensor<64x64xf32>\n" + dot("out", "x", "t"),
            3 * X,
            1,
        ),
        (
            "%out = stablehlo.transpose %x, dims = [1, 0] : (tensor<64x64xf32>) -> "
            "tensor<64x64xf32>\n",
            2 * X,
            1,
        ),
        # tanh(x) is needed by the product, and computed again by the sum behind it.
        (
            unary("tanh", "a", "x")
            + unary("exponential", "b", "x")
            + dot("c", "a", "w")
            + binary("add", "out", "b", "c"),
            2 * X + 3 * X + 3 * X,
            3,
        ),
        # The sum of two matrices is written for the sum behind the product.
        (
            binary("add", "a", "x", "w") + dot("c", "a", "w") + binary("add", "out", "a", "c"),
            3 * X + 3 * X + 3 * X,
            3,
        ),
    ],
    ids=[
        "chain",
        "softmax",
        "along columns",
        "mask",
        "bias",
        "dot",
        "behind a dot",
        "transposed operand",
        "transposed result",
        "computed again",
        "residual",
    ],
)
def test_bytes_and_kernels(ops: str, num_bytes: float, kernels: int) -> None:
    assert moved(ops) == (num_bytes, kernels)


@pytest.mark.parametrize(
    ("text", "convert", "product"),
    [
        ("", 0, X / 2 + X + X / 2),  # an argument, read by a product alone
        ("%also = stablehlo.tanh %w : tensor<64x64xf32>", X + X / 2, 3 * X / 2),
        ("%also = stablehlo.tanh %half : tensor<64x64xf16>", X + X / 2, 3 * X / 2),
    ],
    ids=["alone", "another reads the argument", "another reads the result"],
)
def test_a_product_in_triton_converts_an_argument(
    text: str, convert: float, product: float
) -> None:
    module = parse(f"""
    func.func public @main(%x: tensor<64x64xf16>, %w: tensor<64x64xf32>) -> tensor<64x64xf16> {{
      %half = stablehlo.convert %w : (tensor<64x64xf32>) -> tensor<64x64xf16>
      {text}
      %out = stablehlo.dot_general %x, %half, contracting_dims = [1] x [0] :
        (tensor<64x64xf16>, tensor<64x64xf16>) -> tensor<64x64xf16>
      return %out : tensor<64x64xf16>
    }}""")
    block = body(main_function(module))
    found = op_work.fused(block, converts_in_dots=True)
    assert (found[0].bytes, found[-2].bytes) == (convert, product)
    assert op_work.fused(block)[0].bytes == X + X / 2


def test_kinds() -> None:
    ops = unary("tanh", "a", "x") + dot("out", "a", "w")
    assert [work.kind for work in works(ops)][1:3] == ["elementwise", "matrix"]
    convolution = (
        "%i = stablehlo.reshape %x : (tensor<64x64xf32>) -> tensor<1x64x64x1xf32>\n"
        "%k = stablehlo.constant dense<1.0> : tensor<3x3x1x1xf32>\n"
        "%out = stablehlo.convolution(%i, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->"
        "[b, 0, 1, f], window = {} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
        "(tensor<1x64x64x1xf32>, tensor<3x3x1x1xf32>) -> tensor<1x62x62x1xf32>\n"
    )
    assert works(convolution, "1x62x62x1xf32")[3].kind == "convolution"


def test_a_slice_is_read_where_it_lies() -> None:
    ops = (
        "%s = stablehlo.slice %x [0:64, 0:32] : (tensor<64x64xf32>) -> tensor<64x32xf32>\n"
        "%out = stablehlo.tanh %s : tensor<64x32xf32>\n"
    )
    assert moved(ops, "64x32xf32") == (X, 1)


def test_an_update_is_a_kernel_per_array() -> None:
    """The learning rate that they share does not make one of them."""
    scalars = "%rate = stablehlo.tanh %zero : tensor<f32>\n"
    each = "".join(
        f"%l{n} = stablehlo.broadcast_in_dim %rate, dims = [] : (tensor<f32>) -> "
        f"tensor<64x64xf32>\n" + binary("multiply", f"a{n}", f"l{n}", value)
        for n, value in enumerate(("x", "w"))
    )
    ops = scalars + each + dot("out", "a0", "a1")
    assert moved(ops) == (4 * X + 3 * X, 3)


def test_a_loop_moves_its_body_s_bytes_each_time() -> None:
    def loop(trips: int) -> tuple[float, float]:
        return moved(f"""
          %i0 = stablehlo.constant dense<0> : tensor<i32>
          %one = stablehlo.constant dense<1> : tensor<i32>
          %end = stablehlo.constant dense<{trips}> : tensor<i32>
          %n, %out = stablehlo.while(%i = %i0, %a = %x) : tensor<i32>, tensor<64x64xf32>
          cond {{
            %p = stablehlo.compare LT, %i, %end : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %p : tensor<i1>
          }} do {{
            %b = stablehlo.tanh %a : tensor<64x64xf32>
            %j = stablehlo.add %i, %one : tensor<i32>
            stablehlo.return %j, %b : tensor<i32>, tensor<64x64xf32>
          }}
        """)

    (two, few), (ten, many) = loop(2), loop(10)
    assert ten == 5 * two
    assert many == 5 * few
    assert 2 * 2 * X <= two <= 2 * (2 * X + 16)


def test_unfused_ops_read_and_write_everything() -> None:
    block = body(
        main_function(
            parse(
                f"{HEAD} -> tensor<64x64xf32> {{ {unary('tanh', 'a', 'x')} "
                f"{unary('tanh', 'out', 'a')} return %out : tensor<64x64xf32> }}"
            )
        )
    )
    ideal = op_work.unfused(list(block.operations)[:-1])
    assert op_work.total(ideal) == (2 * 64 * 64, 4 * X, 0)
