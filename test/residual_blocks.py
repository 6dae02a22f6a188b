"""A network of many equal blocks, each of two equal halves between which little crosses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def weights(blocks: int) -> list[tuple[jax.Array, jax.Array]]:
    """Those of each block, of shapes (8, 16) and (16, 8); both halves use them."""

    def random(seed: int, *shape: int) -> jax.Array:
        values = np.random.default_rng(seed).normal(size=shape)
        return jnp.asarray(0.2 * values, jnp.float32)

    return [(random(2 * i, 8, 16), random(2 * i + 1, 16, 8)) for i in range(blocks)]


def train(weights: Any, x: jax.Array) -> Any:
    """A training step: the new weights and the loss of samples of 8 features."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for w, v in weights:
            for _ in range(2):
                y = y + jnp.tanh(y @ w) @ v
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value
