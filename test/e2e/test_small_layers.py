"""A step that is cut into many small layers computes what plain JAX computes."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.dialects import main_function
from alpa.dialects.plan import read_meshes
from alpa.runtime.reference import compare

BLOCKS = 20


def half(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ v


def train(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for w, v in weights:
            y = half(half(y, w, v), w, v)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_three_stages_of_forty_layers() -> None:
    def random(seed: int, *shape: int) -> jax.Array:
        values = np.random.default_rng(seed).normal(size=shape)
        return jnp.asarray(0.2 * values, jnp.float32)

    weights = [(random(2 * i, 8, 16), random(2 * i + 1, 16, 8)) for i in range(BLOCKS)]
    x = random(2 * BLOCKS, 16, 8)
    step = alpa.parallelize(
        train, cluster="cpu:1x4", num_micro_batches=4, batch_argnums=1, num_stages=3
    )
    main = main_function(step.prepare(weights, x).plan.module)
    assert len(read_meshes(main)) == 3
    layers = set(re.findall(r'"layer_\d+"', str(main)))
    assert len(layers) == 2 * BLOCKS
    pairs = (step(weights, x), jax.jit(train)(weights, x))
    assert all(it.ok for it in compare(*([*map(np.asarray, jax.tree.leaves(p))] for p in pairs)))
