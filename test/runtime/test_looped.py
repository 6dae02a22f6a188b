"""`alpa.runtime.looped`: plain JAX from micro-batch to micro-batch, against loops by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.looped import looped

NUMBER = 4


def loss(w: Any, running: Any, x: Any, key: Any) -> tuple[Any, tuple[Any, Any]]:
    mean = x.mean(0)
    y = jnp.tanh((x - mean) @ w) + 0.1 * jax.random.normal(key, (x.shape[0], w.shape[1]))
    return jnp.mean(y**2), (0.9 * running + 0.1 * mean, y)


def update(w: Any, gradient: Any, value: Any, key: Any) -> Any:
    return w - 0.1 * gradient / (1 + value) + 1e-3 * jax.random.normal(key, w.shape)


def step(state: dict[str, Any], batch: Any, key: Any) -> Any:
    both = alpa.value_and_grad(loss, has_aux=True)
    (value, (running, y)), gradient = both(state["w"], state["running"], batch, key)
    w = update(state["w"], gradient, value, key)
    return {"w": w, "running": running}, value, y, jax.random.split(key)[0]


def by_hand(state: dict[str, Any], batch: Any, key: Any) -> Any:
    values, gradients, outputs, running = [], [], [], state["running"]
    for m, part in enumerate(jnp.split(batch, NUMBER)):
        both = jax.value_and_grad(loss, has_aux=True)
        (value, (running, y)), gradient = both(
            state["w"], running, part, jax.random.fold_in(key, m)
        )
        values.append(value)
        gradients.append(gradient)
        outputs.append(y)
    value, gradient = sum(values) / NUMBER, sum(gradients) / NUMBER
    new = {"w": update(state["w"], gradient, value, key), "running": running}
    return new, value, jnp.concatenate(outputs), jax.random.split(key)[0]


def arguments() -> tuple[Any, ...]:
    r = np.random.default_rng(0)
    state = {"w": r.normal(size=(6, 3)), "running": r.normal(size=6)}
    state = jax.tree.map(lambda a: a.astype(np.float32), state)
    return state, r.normal(size=(8, 6)).astype(np.float32), np.asarray(jax.random.PRNGKey(3))


def lowered(function: Any, *given: Any, **options: Any) -> Any:
    return alpa.parallelize(
        function,
        cluster="cpu:1x1",
        num_micro_batches=NUMBER,
        micro_batches="independent",
        batch_argnums=1,
        **options,
    ).lower(*given)


def test_keys_state_of_the_forward_part_and_the_loss_in_the_update() -> None:
    given = arguments()
    results = jax.jit(looped(lowered(step, *given), "mean"))(*jax.tree.leaves(given))
    expected = jax.tree.leaves(by_hand(*given))
    assert len(results) == len(expected)
    for a, b in zip(results, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_may_be_added_up() -> None:
    def summed(w: Any, x: Any) -> Any:
        value, gradient = alpa.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.1 * gradient, value

    state, batch, _ = arguments()
    given = state["w"], batch
    loop = looped(lowered(summed, *given, loss_reduction="sum"), "sum")
    for a, b in zip(loop(*given), summed(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_unmarked_gradients_need_a_reference() -> None:
    def unmarked(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    state, batch, _ = arguments()
    with pytest.raises(ValueError, match=r"marks no gradients.* use alpa.grad, or give compare_wi"):
        looped(lowered(unmarked, state["w"], batch), "mean")


def test_update_that_reads_samples_needs_a_reference() -> None:
    def mixed(w: Any, x: Any) -> Any:
        gradient = alpa.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient * jnp.max(x, 0)[:, None]

    state, batch, _ = arguments()
    loop = looped(lowered(mixed, state["w"], batch), "mean")
    with pytest.raises(ValueError, match=r"the update of mixed reads float32\[6, 1\] of the forw"):
        loop(state["w"], batch)
