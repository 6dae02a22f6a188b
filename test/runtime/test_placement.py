"""Arrays of the caller on their way to a plan's meshes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import alpa
from alpa.runtime.placement import rows

DRAW = np.random.default_rng(0)
W, X = (DRAW.normal(size=(8, 8)).astype(np.float32) for _ in range(2))


def explicit(array: np.ndarray) -> jax.Array:
    """The array, split over two devices of a mesh as `jax.make_mesh` makes it."""
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec("a")))


@pytest.mark.parametrize("array", [X, jnp.asarray(X), explicit(X)], ids=["numpy", "one", "split"])
def test_rows_of_any_array(array: np.ndarray | jax.Array) -> None:
    np.testing.assert_array_equal(rows(array, 0, 2, 5), X[2:5])
    np.testing.assert_array_equal(rows(array, 1, 2, 5), X[:, 2:5])


def test_a_batch_on_a_mesh_with_explicit_axes_is_cut_into_micro_batches() -> None:
    def step(w: Any, x: Any) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    ours = alpa.parallelize(step, cluster="cpu:1x4", num_micro_batches=2, batch_argnums=1)
    expected = jax.jit(step)(W, X)
    for x in (explicit(X), ours.place_batch(explicit(X))):
        for found, wanted in zip(ours(W, x), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
