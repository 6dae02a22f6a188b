"""Numbers of Python in a state stay weakly typed, as with `jax.jit`: they widen no parameter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.dialects.attributes import Slice
from alpa.runtime import WorkerOptions
from alpa.runtime.cut_array import CutArray

two_stages = partial(
    alpa.parallelize, cluster="cpu:2x1", num_micro_batches=2, num_stages=2, donate_argnums=0
)


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (16, 16), jnp.bfloat16) / 4 for key in keys]
    return {"weights": weights, "rate": 0.1, "rates": jnp.full(4, 0.5), "count": 0}


def train_step(state: Any, x: jax.Array) -> Any:
    def loss_fn(weights: Any) -> jax.Array:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(state["weights"])
    steps = zip(state["weights"], grads, state["rates"], strict=True)
    new = {
        "weights": [w - state["rate"] * rate * g for w, g, rate in steps],
        "rate": 0.9 * state["rate"],
        "rates": 0.9 * state["rates"],
        "count": state["count"] + 1,
    }
    return new, (loss, 2.0)


def evaluate(state: Any, x: jax.Array) -> jax.Array:
    return x @ state["weights"][0] * state["rate"]


def batch(number: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), (8, 16), jnp.bfloat16)


def types(tree: Any) -> list[tuple[Any, bool]]:
    return [(array.dtype, array.weak_type) for array in jax.tree.leaves(tree)]


def train(step: Any, state: Any, *numbers: int) -> tuple[Any, list[Any]]:
    losses: list[Any] = []
    for number in numbers:
        state, other = step(state, batch(number))
        losses.append(other)
    return state, losses


def check(directory: Path, **options: Any) -> None:
    """Trains from numbers of Python, from a state that is created, and from one that is restored,
    and evaluates."""
    plain, expected = train(jax.jit(train_step), init(), 0, 1, 2)
    step = two_stages(train_step, **options)
    created = alpa.create_state(init, step, batch(0))
    assert types(created) == types(jax.jit(init)())
    alpa.save(directory, 0, created)
    _, restored = alpa.resume(directory, init, step, batch(0))
    assert types(restored) == types(created)
    for state in (init(), created, restored):
        first = step.prepare(state, batch(0))
        found, losses = train(step, state, 0, 1, 2)
        assert types(found) == types(plain)
        assert types(losses) == types(expected)
        np.testing.assert_allclose(jax.tree.leaves(losses), jax.tree.leaves(expected), rtol=1e-2)
        assert step.prepare(found, batch(0)) is first
        # What a state of numbers is used for has JAX's types, too.
        ahead = alpa.parallelize(evaluate, like=step)(found, batch(3))
        for other in (ahead, evaluate(jax.device_get(found) | {"rate": found["rate"]}, batch(3))):
            assert types(other) == types(evaluate(plain, batch(3)))


def test_in_one_process(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.usefixtures("ray_cluster")
def test_on_ray(tmp_path: Path) -> None:
    check(tmp_path, executor="ray", workers=WorkerOptions(cache_directory=None))


def test_an_array_in_parts() -> None:
    weak = jax.jit(lambda: jnp.full(2, 0.5))()
    strong = jnp.ones(2)
    for part in (weak, strong):
        found = CutArray({_rows(0): part, _rows(2): part})
        assert found.weak_type == found.aval.weak_type == part.weak_type
        assert (found * jnp.ones(4, jnp.bfloat16)).dtype == (part * jnp.bfloat16(1)).dtype


def test_a_number_of_python_is_no_array_of_an_earlier_call() -> None:
    """Its rate would widen the weights. A number that became an array is served as before."""
    step, plain = alpa.parallelize(train_step, cluster="cpu:1x1"), jax.jit(train_step)
    states = [init() | {"rate": rate} for rate in (jnp.float32(0.1), 0.1)]
    for state in states:
        assert types(step(state, batch(0))) == types(plain(state, batch(0)))
    first = step.prepare(states[1], batch(0))
    other = alpa.parallelize(train_step, cluster="cpu:1x1")
    assert other.prepare(states[1], batch(0)) is other.prepare(states[0], batch(0))
    assert first is not step.prepare(states[0], batch(0))


def _rows(start: int) -> Slice:
    return Slice(dim=0, start=start, stop=start + 2)
