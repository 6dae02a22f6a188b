from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

import alpa.passes
from alpa.dialects import mpmd
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.plan.report import PlanReport

BATCHES = 16


def tied(w, v, x, y):
    """Both layers use both parameters: a sum of gradients crosses between them."""

    def loss(w, v):
        h = jnp.tanh(jnp.tanh(x @ w) @ v)
        return jnp.mean((jnp.tanh(h @ v.T) @ w.T - y) ** 2)

    value, (dw, dv) = jax.value_and_grad(loss, (0, 1))(w, v)
    return w - 0.1 * dw, v - 0.1 * dv, value


def tied_text() -> str:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 64)] * 2 + [(8, 64)] * 2]
    return jax.jit(tied, donate_argnums=(0, 1)).lower(*shapes).as_text()


def test_a_sum_of_gradients_is_reduced_once_in_a_step_before_it_crosses():
    module = alpa.passes.run(
        tied_text().replace("tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax'),
        "alpa{cluster=cpu:2x2 num-layers=2 num-stages=2 intra=data-parallel schedule=1f1b "
        f"num-micro-batches={BATCHES}}}",
    )
    sums = [one for one in PlanReport.of(module).collectives if one.kind == "all-reduce"]
    gradients = [one for one in sums if one.bytes == 64 * 64 * 4]
    assert {one.part for one in gradients} == {"update"}
    # Of both parameters on both meshes.
    assert sum(one.count for one in gradients) == 4


def test_a_sum_of_gradients_crosses_once_in_a_step(pose):
    module = alpa.passes.run(
        tied_text(),
        "simplify-trivial-ops,layer-cluster{num-layers=2},"
        f"stage-mesh-partition{{cluster=cpu:2x2 num-stages=2 num-micro-batches={BATCHES}}}",
    )
    times: set[tuple[tuple[int, ...], int]] = set()
    for posed in pose(module):
        for op in posed.graph.steps:
            if isinstance(op, mpmd.TransferOp) and op.results[0] in posed.graph.tensors:
                tensor = MeshTensor.from_type(op.results[0].type)
                # The first layout is the replica: all bytes cross.
                costs = posed.graph.costs[posed.graph.tensors[op.results[0]].node]
                seconds = type_bytes(tensor.type) / posed.landing_bandwidth
                times.add((tuple(tensor.type.shape), round(costs[0] / seconds)))
    assert times == {((8, 64), BATCHES), ((64, 64), 1)}


def test_values_behind_one_barrier_are_sharded_apart() -> None:
    """The best plan splits the rows of `x` over all devices, and no matrix."""

    def predict(w: jax.Array, x: jax.Array, *, barrier: bool) -> jax.Array:
        h = jnp.tanh(x @ w)
        v = w * 2
        h, v = jax.lax.optimization_barrier((h, v)) if barrier else (h, v)
        return jnp.tanh(h @ v)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(64, 64), (4096, 64)]]
    plain, apart = (
        PlanReport.of(
            alpa.passes.run(
                jax.jit(partial(predict, barrier=barrier)).lower(*shapes).as_text(),
                "alpa{cluster=cpu:1x4 num-layers=1}",
            )
        )
        for barrier in (False, True)
    )
    assert not apart.collectives
    assert apart.predicted_step_seconds == plain.predicted_step_seconds
    assert apart.predicted_peak_bytes == plain.predicted_peak_bytes
