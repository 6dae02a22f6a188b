"""Parameters that are used several times: one accumulator and one reduction for each mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.passes.plan.reader import read_planned
from alpa.runtime.reference import compare

WIDTH = 32
GENERATOR = np.random.default_rng(0)


def loss_of(params: Any, batch: Any) -> jax.Array:
    """A language model in small: the embedding is the head, too, and both inner layers are one."""
    tokens, classes = batch
    h = params["tied"][tokens]
    for _ in range(2):
        h = jnp.tanh(h @ params["shared"] + params["bias"])
        alpa.mark_layer_boundary()
    logits = h @ params["tied"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


def step(params: Any, batch: Any) -> Any:
    loss, grads = alpa.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


def arguments() -> Any:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(GENERATOR.normal(size=shape), jnp.float32) / WIDTH**0.5

    params = {"tied": normal(64, WIDTH), "shared": normal(WIDTH, WIDTH), "bias": normal(WIDTH)}
    return params, tuple(GENERATOR.integers(0, 64, (2, 32)))


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"mesh_shape": "1x4"},
        {"mesh_shape": "1x4", "intra": "data-parallel"},
        {"mesh_shape": "1x2", "schedule": "gpipe"},
        {"mesh_shape": "1x2", "schedule": "1f1b"},
    ],
    ids=["one-mesh", "data-parallel", "gpipe", "1f1b"],
)
def test_tied_weights_equal_plain_jax(options: Any, num_micro_batches: int) -> None:
    planned = alpa.parallelize(
        step, cluster="cpu:1x4", num_micro_batches=num_micro_batches, **options
    )
    params, batch = arguments()
    found = expected = params
    for _ in range(3):
        found, loss = planned(found, batch)
        expected, expected_loss = jax.jit(step)(expected, batch)
        pairs = (*found.values(), loss), (*expected.values(), expected_loss)
        assert all(one.ok for one in compare(*pairs))
    program = read_planned(planned.plan(params, batch).module)
    assert len(program.meshes) == (1 if options["mesh_shape"] == "1x4" else 2)
    gradients = [program.values[v] for v in program.gradients]
    found_on = [(value.mesh, value.shape) for value in gradients]
    assert len(found_on) == len(set(found_on))  # The parameters have different shapes.
