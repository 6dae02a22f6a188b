"""Steps inside of `jax.set_mesh`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import alpa


def test_the_callers_mesh_is_hidden_from_a_step_and_stays() -> None:
    """The step has stages on two devices each, the caller's mesh has the first two."""

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_fn(params: list[jax.Array]) -> jax.Array:
            first, second = params
            return jnp.mean(jnp.tanh(x @ first) @ second)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    params, x = [jnp.ones((4, 4)) / 4] * 2, jnp.ones((4, 4))
    ours = alpa.parallelize(step, cluster="cpu:1x4", mesh_shape="2", num_layers=2, batch_argnums=1)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x = ours.place_batch(x)
        first, _ = ours(params, x)
        found = ours(first, ours.place_batch(np.ones((4, 4), np.float32)))
        assert jax.sharding.get_abstract_mesh().axis_names == ("a",)
    expected = step(*step(params, x)[:1], x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
