"""Stages of 1 to 6 devices on hosts of three, six and seven; their steps equal plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.reference import compare

LAYERS, WIDTH, BATCH = 6, 60, 48


def train_step(weights: Any, x: jax.Array) -> Any:
    def loss_fn(weights: Any) -> jax.Array:
        hidden = x
        for number, weight in enumerate(weights):
            if number:
                alpa.mark_layer_boundary()
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


@pytest.mark.parametrize(
    ("cluster", "options", "devices"),
    [
        ("cpu:1x6", {"num_stages": 2}, [(0, 1, 2), (3, 4, 5)]),
        ("cpu:2x3", {"num_stages": 2}, [(0, 1, 2), (3, 4, 5)]),
        (
            "cpu:1x6",
            {"force": ["layers 0-0 on 1x1", "layers 1-2 on 1x3", "layers 3-5 on 1x2"]},
            [(3,), (0, 1, 2), (4, 5)],
        ),
        ("cpu:1x3", {"num_stages": 2}, [(0,), (1, 2)]),
        (
            "cpu:1x7",
            {"force": ["layers 0-1 on 1x2", "layers 2-5 on 1x5"]},
            [(0, 1), (2, 3, 4, 5, 6)],
        ),
        (
            "cpu:2x3",
            {"force": [f"layer {n} on 1x{size}" for n, size in ((0, 1), (1, 3), (2, 1))]},
            [(3,), (0, 1, 2), (4,), (5,)],
        ),
    ],
)
def test_steps_equal_plain_jax(
    cluster: str, options: dict[str, Any], devices: list[tuple[int, ...]]
) -> None:
    draw = np.random.default_rng(0).normal
    weights = [draw(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(LAYERS)]
    x = draw(size=(BATCH, WIDTH)).astype(np.float32)
    step = alpa.parallelize(
        train_step, cluster=cluster, num_layers=LAYERS, num_micro_batches=4, **options
    )
    assert [mesh.devices for mesh in step.plan(weights, x).meshes] == devices
    found, expected = weights, weights
    for _ in range(2):
        found, loss = step(found, x)
        expected, expected_loss = jax.jit(train_step)(expected, x)
        rows = compare(
            [np.asarray(it) for it in [*jax.tree.leaves(found), loss]],
            [np.asarray(it) for it in [*jax.tree.leaves(expected), expected_loss]],
        )
        assert [row for row in rows if not row.ok] == []
