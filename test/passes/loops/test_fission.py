"""Split loops and barriers compute the same bits; what is wanted needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
from alpa.dialects import ir, main_function, stablehlo, terminator, walk
from alpa.passes.loops.dependence import leading_to
from alpa.passes.loops.fission import split_at
from alpa.runtime.reference import run_unplanned

PRODUCT = "stablehlo.dot_general"
Arrays = tuple[jax.Array, ...]


def scanned(x: jax.Array, ws: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


def nested(x: jax.Array, ws: jax.Array) -> jax.Array:
    """Each trip of the outer loop runs a loop over the same weights."""

    def inner(h: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), h, ws)[0], None

    return jnp.sum(jax.lax.scan(inner, x, None, length=3)[0])


def rematerialised(x: jax.Array, ws: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(jnp.sin(h) @ w), None))
    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


def reading_the_trip(x: jax.Array, ws: jax.Array) -> jax.Array:
    def body(h: jax.Array, number_and_w: Arrays) -> tuple[jax.Array, None]:
        number, w = number_and_w
        return jnp.tanh(h @ w) * (1 + number.astype(h.dtype)), None

    return jnp.sum(jax.lax.scan(body, x, (jnp.arange(4), ws))[0])


def backwards(x: jax.Array, ws: jax.Array) -> jax.Array:
    return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws, reverse=True)[0])


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=size).astype(np.float32) for size in ((4, 8), (4, 8, 8))]


def lowered(function: Callable[..., Any]) -> ir.Module:
    shapes = [jax.ShapeDtypeStruct(it.shape, it.dtype) for it in arguments()]
    return alpa.passes.run(jax.jit(function).lower(*shapes).as_text(), "simplify-trivial-ops")


def bits(results: Sequence[jax.Array]) -> list[bytes]:
    return [np.asarray(it).tobytes() for it in results]


def loops_that_lead_to(module: ir.Module, number: int) -> list[stablehlo.WhileOp]:
    """The loops of @main that make something that one of its results depends on."""
    block = main_function(module).entry_block
    found = leading_to(block, [terminator(block).operands[number]])
    return [
        op
        for op in block.operations
        if isinstance(op, stablehlo.WhileOp) and any(it in found for it in op.results)
    ]


@pytest.mark.parametrize("loss", [scanned, nested, rematerialised, reading_the_trip, backwards])
def test_gradients_of_scanned_layers(loss: Callable[..., jax.Array]) -> None:
    module = lowered(jax.grad(loss, argnums=(0, 1)))
    expected = bits(run_unplanned(module, arguments()))
    block = main_function(module).entry_block
    split_at(block, [terminator(block).operands[0]])
    module.operation.verify()
    assert bits(run_unplanned(module, arguments())) == expected
    # The gradient of the input needs no loop that makes the gradients of the weights, and these
    # loops multiply only for them.
    mine, all_loops = loops_that_lead_to(module, 0), loops_that_lead_to(module, 1)
    more = [op for op in all_loops if op not in mine]
    products = [op for it in more for op in walk(it.regions[1].blocks[0]) if op.name == PRODUCT]
    assert len(mine) == 2
    assert len(products) == 1


def test_a_loop_whose_trips_depend_on_data_stays_whole() -> None:
    def function(x: jax.Array, ws: jax.Array) -> Arrays:
        def body(state: Arrays) -> Arrays:
            h, total = state
            return jnp.sin(h @ ws[0]) / 2, total + h

        return jax.lax.while_loop(lambda state: jnp.sum(state[0]) > 0.1, body, (x, x))

    module = lowered(function)
    before = str(module)
    block = main_function(module).entry_block
    split_at(block, [terminator(block).operands[0]])
    assert str(module) == before


def test_barriers_are_split_by_their_operands() -> None:
    def function(x: jax.Array, ws: jax.Array) -> Arrays:
        a, b = jax.lax.optimization_barrier((x + 1, ws + 1))
        return a * 2, b * 2

    module = lowered(function)
    block = main_function(module).entry_block
    split_at(block, [terminator(block).operands[0]])
    barriers = [op for op in block.operations if isinstance(op, stablehlo.OptimizationBarrierOp)]
    assert [len(op.results) for op in barriers] == [1, 1]
    assert len(leading_to(block, [terminator(block).operands[0]]) & {*block.arguments}) == 1
