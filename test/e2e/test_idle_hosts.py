"""A plan may leave hosts of its one kind idle; its steps equal plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime.reference import compare


def train_step(weights: Any, x: jax.Array) -> Any:
    def loss_fn(weights: Any) -> jax.Array:
        hidden = x
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def test_steps_equal_plain_jax() -> None:
    """64 rows are not split over 3 hosts, which would only repeat one another's work."""
    draw = np.random.default_rng(0).normal
    weights = [draw(size=(128, 128)).astype(np.float32) / 12 for _ in range(2)]
    x = draw(size=(64, 128)).astype(np.float32)
    step = alpa.parallelize(
        train_step,
        cluster="h100:3x1",
        executor="local",
        num_micro_batches=2,
    )
    plan = step.plan(weights, x)
    assert [mesh.hosts for mesh in plan.meshes] == [(0,)]
    expected, expected_loss = jax.jit(train_step)(weights, x)
    for _ in range(2):
        found, loss = step(weights, x)
        rows = compare(
            [np.asarray(it) for it in [*jax.tree.leaves(found), loss]],
            [np.asarray(it) for it in [*jax.tree.leaves(expected), expected_loss]],
        )
        assert [row for row in rows if not row.ok] == []
