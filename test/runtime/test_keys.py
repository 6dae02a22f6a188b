"""Random keys inside loops, branches and recomputed functions, and what plain JAX draws there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.compare_with_jax import compare_with_jax
from alpa.runtime.planning import PlanningError

R = np.random.default_rng(0)
W = (0.4 * R.normal(size=(3, 6, 6))).astype(np.float32)
X = R.normal(size=(8, 6)).astype(np.float32)


def dropped(x: Any, key: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)


def layer(x: Any, w: Any, key: Any) -> Any:
    return dropped(jnp.tanh(x @ w), key)


def step_of(model: Callable[..., Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any, key: Any) -> Any:
        value, g = alpa.value_and_grad(lambda w: jnp.mean(model(w, x, key) ** 2))(weights)
        return weights - 0.1 * g, value

    return step


def in_two_parts(model: Callable[..., Any]) -> Any:
    """A step of a model, in two micro-batches."""
    settings = {"cluster": "cpu:1x1", "num_micro_batches": 2, "batch_argnums": "x"}
    return alpa.parallelize(step_of(model), **settings)


def carried(weights: Any, x: Any, key: Any) -> Any:
    """A loop carries the key, and counts its iterations."""

    def body(carry: Any, w: Any) -> Any:
        x, key, n = carry
        key, own = jax.random.split(key)
        return (layer(x, w, own) + n, key, n + 1), None

    return jax.lax.scan(body, (x, key, 0), weights)[0][0]


def in_rows(weights: Any, x: Any, key: Any) -> Any:
    """A recomputed function inside a loop reads a key of each layer, from the last to the first."""
    body = jax.checkpoint(lambda x, row: (layer(x, *row), None))
    keys = jax.random.split(key, len(weights))
    return jax.lax.scan(body, x, (weights, keys), reverse=True)[0]


def recomputed(weights: Any, x: Any, key: Any) -> Any:
    for n, w in enumerate(weights):
        x = jax.checkpoint(layer)(x, w, jax.random.fold_in(key, n))
    return x


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (carried, jax.random.key(3)),
        (carried, jax.random.PRNGKey(3)),
        (in_rows, jax.random.key(4)),
        (recomputed, jax.random.key(5)),
    ],
)
def test_plain_jax_draws_the_numbers_of_micro_batches(model: Callable[..., Any], key: Any) -> None:
    step, plain = in_two_parts(model), step_of(model)

    def by_hand(weights: Any, x: Any, key: Any) -> Any:
        keys = [jax.random.fold_in(key, m) for m in range(2)]
        parts = [plain(weights, x[4 * m : 4 * m + 4], keys[m]) for m in range(2)]
        return jax.tree.map(lambda a, b: (a + b) / 2, *parts)

    for given in (None, by_hand):
        report = compare_with_jax(step, W, X, key, reference=given)
        assert {tensor.verdict for tensor in report.tensors} == {"equal"}, given
    assert compare_with_jax(step, W, X, key, reference="whole-batch").is_fault


def test_numbers_inside_a_branch_have_no_reference() -> None:
    def model(weights: Any, x: Any, key: Any) -> Any:
        branches = layer, lambda x, w, key: dropped(x, key)
        return jax.lax.cond(weights[0, 0, 0] > 0, *branches, x, weights[0], key)

    step = in_two_parts(model)
    with pytest.raises(ValueError, match=r"inside cond.*reference=f"):
        compare_with_jax(step, W, X, jax.random.key(3))


def carried_beside(weights: Any, x: Any, key: Any) -> Any:
    """A loop carries the step's key, and another one that draws."""

    def body(carry: Any, w: Any) -> Any:
        x, key, own = carry
        x = dropped(layer(x, w, key), own)
        return (x, jax.random.fold_in(key, 1), jax.random.fold_in(own, 1)), None

    return jax.lax.scan(body, (x, key, jax.random.key(0)), weights)[0][0]


def replaced_in_a_loop(weights: Any, x: Any, key: Any) -> Any:
    """The first iteration draws from the step's key, the others from another one."""

    def body(carry: Any, w: Any) -> Any:
        return (layer(carry[0], w, carry[1]), jax.random.key(1)), None

    return jax.lax.scan(body, (x, key), weights)[0][0]


def drawn_from_behind_a_loop(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        x, key, own = carry
        return (layer(x, w, key), jax.random.fold_in(key, 1), jax.random.fold_in(own, 1)), None

    x, _, own = jax.lax.scan(body, (x, key, jax.random.key(0)), weights)[0]
    return dropped(x, own)


def carried_by_a_while(weights: Any, x: Any, key: Any) -> Any:
    def body(n: Any, carry: Any) -> Any:
        x, key, own = carry
        return dropped(dropped(x, key), own), jax.random.fold_in(key, n), jax.random.fold_in(own, n)

    start = jax.lax.stop_gradient(x), key, jax.random.key(0)
    return jax.lax.fori_loop(0, jnp.int32(3), body, start)[0] @ weights[0]


def in_one_branch(weights: Any, x: Any, key: Any) -> Any:
    keys = key, jax.random.key(0)
    branches = [lambda x, a, b: dropped(x, a), lambda x, a, b: dropped(2 * x, b)]
    return jax.lax.cond(weights[0, 0, 0] > 0, *branches, x @ weights[0], *keys)


OWN_KEYS = (
    carried_beside,
    replaced_in_a_loop,
    drawn_from_behind_a_loop,
    carried_by_a_while,
    in_one_branch,
)


@pytest.mark.parametrize("model", OWN_KEYS)
def test_key_made_inside_the_step_draws_no_numbers_of_samples(model: Callable[..., Any]) -> None:
    """All micro-batches would draw the same numbers, also beside the step's key."""
    with pytest.raises(PlanningError, match="a key that is no argument of the step"):
        in_two_parts(model).plan(W, X, jax.random.key(3))
