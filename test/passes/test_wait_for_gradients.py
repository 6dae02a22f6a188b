"""Programs that compute activations again, without barriers that say when."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function, mpmd, parse, stablehlo
from alpa.dialects.attributes import read_part
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.runtime.ahead_of_time import compilation
from alpa.runtime.ahead_of_time.verification import verify_plan
from alpa.runtime.compare_programs import compare_programs

LAYERS = 12

Params = list[tuple[jax.Array, jax.Array]]


def block(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    wide, narrow = params
    return x + jnp.tanh(jnp.sin(x @ wide) @ narrow)


def step(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
    again = jax.checkpoint(block, prevent_cse=False)

    def loss(params: Params) -> jax.Array:
        y = x
        for one in params:
            y = again(one, y)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@cache
def program(rows: int = 16, width: int = 32) -> str:
    """A chain of residual blocks that computes each of them twice."""
    params = [(jnp.zeros((width, 4 * width)), jnp.zeros((4 * width, width)))] * LAYERS
    text = jax.jit(step, donate_argnums=0).lower(params, jnp.zeros((rows, width))).as_text()
    assert "optimization_barrier" not in text
    return text


def gates(module: ir.Module) -> list[int]:
    """How many values pass each barrier of the backward fragments."""
    return [
        len(op.operands)
        for fragment in body(main_function(module)).operations
        if isinstance(fragment, mpmd.FragmentOp) and read_part(fragment) == "backward"
        for op in body(fragment).operations
        if isinstance(op, stablehlo.OptimizationBarrierOp)
    ]


def without_barriers(module: ir.Module) -> ir.Module:
    """The plan of a compiler that does not order anything."""
    plan = parse(str(module))
    for fragment in body(main_function(plan)).operations:
        if isinstance(fragment, mpmd.FragmentOp):
            for op in list(body(fragment).operations):
                if isinstance(op, stablehlo.OptimizationBarrierOp):
                    for operand, result in zip(op.operands, op.results, strict=True):
                        result.replace_all_uses_with(operand)
                    op.erase()
    return plan


@pytest.mark.parametrize(
    "options",
    [
        "num-micro-batches=1",
        "num-micro-batches=2",
        "num-micro-batches=2 mesh-shape=1",
        "num-micro-batches=4 mesh-shape=1 schedule=zb-h1",
        "num-micro-batches=2 remat=layer",
    ],
)
def test_the_numbers_are_those_of_one_device(options: str) -> None:
    planned = alpa.passes.run(program(), f"alpa{{cluster=cpu:1x2 num-layers=6 {options}}}")
    assert any(gates(planned))
    assert not compare_programs(parse(program()), planned).is_fault


@pytest.mark.parametrize("cluster", ["h100:1x1", "cpu:1x1"])
def test_one_layer_is_computed_again_at_a_time(cluster: str) -> None:
    """On Hopper GPUs, XLA would compute gradients of weights at the end."""
    planned = alpa.passes.run(program(2048, 128), f"alpa{{cluster={cluster} num-layers=6}}")
    before = gates(planned)
    assert before == [3] * 5  # Two activations, of two blocks, and a cotangent.
    waiting = alpa.passes.run(str(planned), "merge-fragments,wait-for-gradients")
    assert all(after > count for after, count in zip(gates(waiting), before, strict=True))
    none, some = (
        sum(it.temporaries for it in predicted_memory(module))
        for module in (
            alpa.passes.run(str(without_barriers(planned)), "merge-fragments"),
            waiting,
        )
    )
    assert some < 0.6 * none


@pytest.mark.skipif(compilation.missing_packages() != [], reason="needs the extra gpu-aot")
def test_so_does_xla_for_gpus() -> None:
    planned = alpa.passes.run(program(8192, 512), "alpa{cluster=h100:1x4 num-layers=6}")
    some, none = (
        verify_plan(module, processes=1).modules[-1].real.temporaries
        for module in (planned, without_barriers(planned))
    )
    assert some < 0.6 * none
