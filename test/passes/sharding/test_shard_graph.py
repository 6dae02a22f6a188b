"""Costs of changes of layout, alone and combined."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import body, main_function, mpmd
from alpa.dialects.attributes import SECONDS, read_float, read_part
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_gather, all_reduce

LAYERS, WIDTH, ROWS = 8, 256, 1024


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value


def seconds(cluster: str, intra: str, shape: str = "8") -> dict[str, float]:
    """Of one run of each part of a step of LAYERS layers, on one mesh of 8 devices."""
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    text = jax.jit(step, donate_argnums=(0,)).lower(weights, x).as_text()
    text = re.sub(
        rf"(%arg{LAYERS}: tensor<[^>]*>)",
        r'\1 {alpa.role = "batch", alpa.batch_dim = 0 : i64}',
        text,
        count=1,
    ).replace('{jax.result_info = "result[1]"}', '{alpa.result = "mean"}')
    options = f"cluster={cluster} num-layers=1 num-stages=1 num-micro-batches=4"
    module = passes.run(text, f"alpa{{{options} intra={intra} mesh-shape={shape}}}")
    found: dict[str, float] = {}
    for op in body(main_function(module)).operations:
        if isinstance(op, mpmd.FragmentOp):
            found[str(read_part(op))] = read_float(op, SECONDS) or 0.0
    return found


def one(collective: Callable[[LogicalMesh, int, float], float], cluster: str) -> float:
    """Seconds of a collective on a matrix, alone."""
    mesh = LogicalMesh.of(Cluster.parse(cluster), 1, 8, (8,))
    return collective(mesh, 0, 4.0 * WIDTH * WIDTH)


def test_sums_of_gradients_share_their_starts_on_gpus() -> None:
    found = seconds("h100:1x8", "data-parallel")["update"]
    assert found < 0.5 * LAYERS * one(all_reduce, "h100:1x8")
    found = seconds("h100:1x8,ideal", "data-parallel")["update"]
    assert found >= LAYERS * one(all_reduce, "h100:1x8,ideal")


def test_gathers_of_weights_share_their_starts_on_gpus() -> None:
    assert seconds("h100:1x8", "zero3")["forward"] < 0.5 * LAYERS * one(all_gather, "h100:1x8")


@pytest.mark.parametrize("made_of_others", [False, True])
def test_collectives_on_activations_are_alone(made_of_others: bool) -> None:
    rows, width = 8192, 32  # so large a product is split
    cut, whole = '#sdy.sharding<@mesh, [{"a"}, {}]>', "<@mesh, [{}, {}]>"
    type_ = f"tensor<{rows}x{width}xf32>"
    text = f"""
    sdy.mesh @mesh = <["a"=8]>
    func.func public @main(%x: {type_} {{sdy.sharding = {cut}}}, %a: tensor<{width}xf32>,
        %b: tensor<{width}xf32>, %c: tensor<{width}xf32>) -> ({type_}, tensor<{width}xf32>) {{
      %h = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1]
        : ({type_}, {type_}) -> tensor<{rows}x{rows}xf32>
      %0 = stablehlo.slice %h [0:{rows}, 0:{width}]
        : (tensor<{rows}x{rows}xf32>) -> {type_}
      %1 = stablehlo.add %0, %x : {type_}
      %y = sdy.sharding_constraint %{"1" if made_of_others else "x"} {whole} : {type_}
      %ab = stablehlo.add %a, %b : tensor<{width}xf32>
      %abc = stablehlo.add %ab, %c : tensor<{width}xf32>
      return %y, %abc : {type_}, tensor<{width}xf32>
    }}"""
    module = passes.run(text, "alpa{cluster=h100:1x8 num-layers=1 num-stages=1}")
    (fragment,) = (
        op for op in body(main_function(module)).operations if isinstance(op, mpmd.FragmentOp)
    )
    mesh = LogicalMesh.of(Cluster.parse("h100:1x8"), 1, 8, (8,))
    alone = all_gather(mesh, 0, 4.0 * rows * width)
    found = read_float(fragment, SECONDS)
    assert found is not None
    assert (found >= alone) == made_of_others
