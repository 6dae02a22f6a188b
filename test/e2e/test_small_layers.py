"""A step that is cut into many small layers computes what plain JAX computes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.dialects import main_function
from alpa.dialects.plan import read_meshes
from alpa.runtime.reference import compare
from test.residual_blocks import train, weights

BLOCKS = 20


def test_three_stages_of_forty_layers() -> None:
    state = weights(BLOCKS)
    x = jnp.asarray(np.random.default_rng(2 * BLOCKS).normal(size=(16, 8)), jnp.float32)
    step = alpa.parallelize(
        train, cluster="cpu:1x4", num_micro_batches=4, batch_argnums=1, num_stages=3
    )
    main = main_function(step.prepare(state, x).plan.module)
    assert len(read_meshes(main)) == 3
    layers = set(re.findall(r'"layer_\d+"', str(main)))
    assert len(layers) == 2 * BLOCKS
    pairs = (step(state, x), jax.jit(train)(state, x))
    assert all(it.ok for it in compare(*([*map(np.asarray, jax.tree.leaves(p))] for p in pairs)))
