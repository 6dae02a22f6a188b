"""The planner with little memory: what fits is found, however slow that is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import main_function
from alpa.dialects.plan import Plan
from test.conftest import SmallCluster


@pytest.fixture(scope="module")
def program() -> str:
    """Four layers, whose weights and momenta have 1 MiB together."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for wide, narrow in params:
            x = x + jnp.tanh(x @ wide) @ narrow
        return jnp.mean(x**2)

    def step(
        params: list[tuple[jax.Array, jax.Array]],
        momenta: list[tuple[jax.Array, jax.Array]],
        x: jax.Array,
    ):
        value, grads = jax.value_and_grad(loss)(params, x)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momenta), momenta, value

    shapes = [(jnp.zeros((64, 256)), jnp.zeros((256, 64)))] * 4
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(shapes, shapes, jnp.zeros((64, 64)))
    return lowered.as_text().replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )


@pytest.mark.parametrize(("num_stages", "memory"), [("auto", 500), ("2", 700)])
def test_slow_links_are_no_reason_to_say_that_nothing_fits(
    program: str, small_cluster: SmallCluster, num_stages: str, memory: int
) -> None:
    """At prices that are relative to the fastest sharding, 700 and 1,094 KiB are needed."""
    cluster = small_cluster(f"{memory}KiB", bandwidth=1e7)
    options = f"cluster={cluster} num-layers=4 num-micro-batches=4 schedule=1f1b processes=0"
    module = passes.run(program, f"alpa{{{options} num-stages={num_stages}}}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert max(plan.predicted_peak_bytes) <= memory * 1024
