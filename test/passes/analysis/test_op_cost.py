"""FLOPs, bytes and trip counts of ops: ops written by hand, and loops that JAX writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function, parse, stablehlo, walk
from alpa.passes.analysis import op_cost

# An op does not keep its module alive.
MODULES: list[ir.Module] = []


def parsed(text: str) -> ir.Module:
    MODULES.append(parse(text))
    return MODULES[-1]


def last_op(arguments: str, text: str) -> ir.OpView:
    module = parsed(f"func.func @main({arguments}) {{\n{text}\nreturn\n}}")
    *_, op, _return = body(main_function(module)).operations
    return op


CASES = {
    "dot_general counts two per multiply-add": (
        "%x: tensor<2x4x8xf32>, %y: tensor<2x8x3xf32>",
        "%0 = stablehlo.dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [2] x [1]"
        " : (tensor<2x4x8xf32>, tensor<2x8x3xf32>) -> tensor<2x4x3xf32>",
        2 * 2 * 4 * 3 * 8,
        4 * (2 * 4 * 8 + 2 * 8 * 3 + 2 * 4 * 3),
    ),
    "dot": (
        "%x: tensor<4x8xf32>, %y: tensor<8xf32>",
        "%0 = stablehlo.dot %x, %y : (tensor<4x8xf32>, tensor<8xf32>) -> tensor<4xf32>",
        2 * 4 * 8,
        4 * (32 + 8 + 4),
    ),
    "convolution: each output is a window of all input channels": (
        "%x: tensor<2x8x8x3xf32>, %k: tensor<3x3x3x5xf32>",
        "%0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],"
        " window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64,"
        " feature_group_count = 1 : i64}"
        " : (tensor<2x8x8x3xf32>, tensor<3x3x3x5xf32>) -> tensor<2x8x8x5xf32>",
        2 * (2 * 8 * 8 * 5) * (3 * 3 * 3),
        4 * (2 * 8 * 8 * 3 + 3 * 3 * 3 * 5 + 2 * 8 * 8 * 5),
    ),
    "depthwise convolution: one channel each": (
        "%x: tensor<2x8x8x6xf32>, %k: tensor<3x3x1x6xf32>",
        "%0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],"
        " window = {pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64,"
        " feature_group_count = 6 : i64}"
        " : (tensor<2x8x8x6xf32>, tensor<3x3x1x6xf32>) -> tensor<2x8x8x6xf32>",
        2 * (2 * 8 * 8 * 6) * (3 * 3),
        4 * (2 * 8 * 8 * 6 + 3 * 3 * 6 + 2 * 8 * 8 * 6),
    ),
    "element-wise": (
        "%x: tensor<4x8xbf16>",
        "%0 = stablehlo.tanh %x : tensor<4x8xbf16>",
        32,
        2 * 64,
    ),
    "a broadcast is free": (
        "%x: tensor<8xf32>",
        "%0 = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<8xf32>) -> tensor<4x8xf32>",
        0,
        0,
    ),
    "a gather reads what it takes, not the table": (
        "%t: tensor<1000x8xf32>, %i: tensor<5x1xi32>",
        '%0 = "stablehlo.gather"(%t, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],'
        " collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,"
        " slice_sizes = array<i64: 1, 8>}> : (tensor<1000x8xf32>, tensor<5x1xi32>)"
        " -> tensor<5x8xf32>",
        40,
        4 * (5 + 40 + 40),
    ),
    "a scatter touches what it writes": (
        "%t: tensor<1000x8xf32>, %i: tensor<5x1xi32>, %u: tensor<5x8xf32>",
        '%0 = "stablehlo.scatter"(%t, %i, %u) <{scatter_dimension_numbers = #stablehlo.scatter<'
        "update_window_dims = [1], inserted_window_dims = [0],"
        " scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({\n"
        "^bb0(%a: tensor<f32>, %b: tensor<f32>):\n%s = stablehlo.add %a, %b : tensor<f32>\n"
        "stablehlo.return %s : tensor<f32>\n})"
        " : (tensor<1000x8xf32>, tensor<5x1xi32>, tensor<5x8xf32>) -> tensor<1000x8xf32>",
        40,
        4 * (5 + 40 + 40),
    ),
    "a dynamic_update_slice touches what it writes": (
        "%t: tensor<1000x8xf32>, %u: tensor<5x8xf32>, %i: tensor<i32>",
        "%0 = stablehlo.dynamic_update_slice %t, %u, %i, %i"
        " : (tensor<1000x8xf32>, tensor<5x8xf32>, tensor<i32>, tensor<i32>) -> tensor<1000x8xf32>",
        40,
        4 * (1 + 1 + 40 + 40),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_and_bytes(case: str) -> None:
    arguments, text, flops, size = CASES[case]
    op = last_op(arguments, text)
    assert op_cost.flops(op) == flops
    assert op_cost.memory_bytes(op) == size


def loop_of(function: Callable[..., jax.Array], *arguments: jax.Array) -> stablehlo.WhileOp:
    module = parsed(jax.jit(function).lower(*arguments).as_text())
    alpa.passes.run(module, "combine-micro-batches{num-micro-batches=1}")  # inlines calls
    (loop,) = (op for op in walk(module.body) if isinstance(op, stablehlo.WhileOp))
    return loop


def scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]


def scan_back(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w, reverse=True)[0]


def step(carry: Any) -> Any:
    return carry[0] + 4, jnp.sin(carry[1])


X, W = jnp.ones((4, 8)), jnp.ones((5, 8, 8))


@pytest.mark.parametrize(
    ("function", "arguments", "trips"),
    [
        (scan, (X, W), 5),
        (scan_back, (X, W), 5),
        (lambda x: jax.lax.fori_loop(3, 10, lambda i, h: jnp.sin(h), x), (X,), 7),
        (lambda x: jax.lax.while_loop(lambda c: c[0] < 3, step, (10, x))[1], (X,), 0),
        (lambda x: jax.lax.while_loop(lambda c: c[0] < 10, step, (1, x))[1], (X,), 3),
        (lambda x: jax.lax.while_loop(lambda h: h.sum() < 10, jnp.sin, x), (X,), None),
        (lambda x, n: jax.lax.fori_loop(0, n, lambda i, h: jnp.sin(h), x), (X, 3), None),
    ],
    ids=["scan", "reverse scan", "fori", "no trip", "rounded up", "while", "bound is data"],
)
def test_trip_count(
    function: Callable[..., jax.Array], arguments: tuple[jax.Array, ...], trips: int | None
) -> None:
    loop = loop_of(function, *arguments)
    counter = op_cost.loop_counter(loop)
    assert (counter and len(counter.values)) == trips
    expected = op_cost.UNKNOWN_TRIP_COUNT if trips is None else trips
    assert op_cost.trip_count_or_default(loop) == expected


def test_a_loop_costs_its_body_times_its_trips() -> None:
    loop = loop_of(scan, X, W)
    dot, tanh = 2 * 4 * 8 * 8, 4 * 8
    slices_and_counting = 8 * 8 + 10
    assert 5 * (dot + tanh) <= op_cost.flops(loop) <= 5 * (dot + tanh + slices_and_counting)


def test_a_branch_costs_as_much_as_its_most_expensive_one() -> None:
    def function(i: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(i > 0, lambda: x @ w, lambda: x)

    module = parsed(jax.jit(function).lower(1, X, W[0]).as_text())
    (branch,) = (op for op in walk(module.body) if op.name in ("stablehlo.case", "stablehlo.if"))
    assert op_cost.flops(branch) == 2 * 4 * 8 * 8
