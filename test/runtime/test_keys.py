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


def loop_recomputed(weights: Any, x: Any, key: Any) -> Any:
    """A whole loop is recomputed."""

    def loop(x: Any, weights: Any, keys: Any) -> Any:
        return jax.lax.scan(lambda x, row: (layer(x, *row), None), x, (weights, keys))[0]

    return jax.checkpoint(loop)(x, weights, jax.random.split(key, len(weights)))


def loop_recomputed_beside(weights: Any, x: Any, key: Any) -> Any:
    """A whole loop is recomputed that draws from a key of the step's own."""
    keys = jnp.stack([key, jax.random.key(0), key])

    def loop(x: Any, weights: Any, keys: Any) -> Any:
        return jax.lax.scan(lambda x, row: (layer(x, *row), None), x, (weights, keys))[0]

    return jax.checkpoint(loop)(x, weights, keys)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (carried, jax.random.key(3)),
        (carried, jax.random.PRNGKey(3)),
        (in_rows, jax.random.key(4)),
        (recomputed, jax.random.key(5)),
        (loop_recomputed, jax.random.key(6)),
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


def written_rows(key: Any) -> Any:
    """An array of keys that starts as zeros."""
    key = jax.random.wrap_key_data(jax.random.key_data(key))
    keys = jax.random.wrap_key_data(jnp.zeros((3, 2), jnp.uint32))
    for n in range(3):
        keys = keys.at[n].set(jax.random.fold_in(key, n))
    return keys


def row_by_row(weights: Any, x: Any, key: Any) -> Any:
    """Keys in rows of zeros, typed ones and the words of others; one row is written twice."""
    for row, w in zip(written_rows(key), weights, strict=True):
        x = jnp.minimum(layer(x, w, row), jnp.full(1, jnp.inf))
    words = jnp.zeros((2, *jax.random.key_data(key).shape), jnp.uint32)
    for n in (1, 0, 1):
        words = words.at[n].set(jax.random.key_data(jax.random.fold_in(key, 5 + n)))
    return layer(x, weights[0], jax.random.wrap_key_data(words[1]))


def of_a_branch(weights: Any, x: Any, key: Any) -> Any:
    own = jax.lax.cond(weights[0, 0, 0] > 1e9, lambda: key, lambda: jax.random.key(0))
    return layer(x, weights[0], own)


def of_a_branch_in_a_loop(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        x, key = carry
        own = jax.lax.cond(w[0, 0] > 1e9, lambda: key, lambda: jax.random.key(7))
        return (layer(x, w, own), jax.random.fold_in(key, 1)), None

    return jax.lax.scan(body, (x, key), weights)[0][0]


def made_by_a_loop(weights: Any, x: Any, key: Any) -> Any:
    keys = jax.lax.scan(lambda c, _: (jax.random.key(1), c), key, None, length=3)[1]
    return layer(x, weights[0], keys[1])


def chosen(weights: Any, x: Any, key: Any) -> Any:
    return layer(x, weights[0], jnp.where(weights[0, 0, 0] > 1e9, key, jax.random.key(0)))


def chosen_of_raw(weights: Any, x: Any, key: Any) -> Any:
    key, own = jax.random.key_data(key), jax.random.PRNGKey(0)
    return layer(x, weights[0], jnp.where(weights[0, 0, 0] > 1e9, key, own))


def chosen_as_integers(weights: Any, x: Any, key: Any) -> Any:
    words = [jax.random.key_data(k).astype(jnp.int32) for k in (key, jax.random.key(0))]
    words = jnp.where(weights[0, 0, 0] > 1e9, *words).astype(jnp.uint32)
    return layer(x, weights[0], jax.random.wrap_key_data(words))


def stacked(weights: Any, x: Any, key: Any) -> Any:
    return layer(x, weights[0], jnp.stack([key, jax.random.key(0)])[1])


def joined_words(weights: Any, x: Any, key: Any) -> Any:
    own = jax.random.PRNGKey(0)
    return layer(x, weights[0], jnp.concatenate([jax.random.key_data(key), own, own])[2:4])


def in_rows_of_others(weights: Any, x: Any, key: Any) -> Any:
    keys = jnp.stack([key, jax.random.key(0), jax.random.key(1)])
    return jax.lax.scan(lambda x, row: (layer(x, *row), None), x, (weights, keys))[0]


def replaced_in_an_array(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        x, keys = carry
        keys = keys.at[1].set(jax.random.key(0))
        return (layer(x, w, keys[1]), keys), None

    return jax.lax.scan(body, (x, jax.random.split(key, 3)), weights)[0][0]


def rows_but_one(weights: Any, x: Any, key: Any) -> Any:
    keys = jnp.zeros((3, 2), jnp.uint32).at[0].set(jax.random.key_data(key))
    return layer(x, weights[0], keys.at[2].set(keys[0])[1])


def row_replaced_again(weights: Any, x: Any, key: Any) -> Any:
    keys = written_rows(key).at[1].set(jax.random.key(0))
    return layer(x, weights[0], keys[1])


def row_out_of_bounds(weights: Any, x: Any, key: Any) -> Any:
    keys = jnp.zeros((2, 2), jnp.uint32).at[0].set(jax.random.key_data(key))
    keys = keys.at[jnp.array([7])].set(jnp.zeros(2, jnp.uint32), mode="clip")
    return layer(x, weights[0], keys.at[0].set(jax.random.key_data(key))[1])


def row_of_a_value(weights: Any, x: Any, key: Any) -> Any:
    place = jnp.argmax(weights[0, 0])
    keys = jnp.zeros((2, 2), jnp.uint32).at[0].set(jax.random.key_data(key))
    return layer(x, weights[0], keys.at[place].set(jax.random.key_data(key))[1])


def chosen_for_each_sample(weights: Any, x: Any, key: Any) -> Any:
    def of_sample(x: Any) -> Any:
        return layer(x, weights[0], jnp.where(x[0] > 1e9, key, jax.random.key(0)))

    return jax.vmap(of_sample)(x)


OWN_KEYS = (
    of_a_branch,
    of_a_branch_in_a_loop,
    made_by_a_loop,
    chosen,
    chosen_of_raw,
    chosen_as_integers,
    stacked,
    joined_words,
    in_rows_of_others,
    replaced_in_an_array,
    rows_but_one,
    row_replaced_again,
    row_out_of_bounds,
    row_of_a_value,
    chosen_for_each_sample,
    loop_recomputed_beside,
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


def switched(weights: Any, x: Any, key: Any) -> Any:
    """All branches make a key of the step's key, in a loop that counts in keys' own type."""

    def body(carry: Any, w: Any) -> Any:
        x, key, n, counts = carry
        branches = [lambda k, m=m: jax.random.fold_in(k, m) for m in range(3)]
        own = jax.lax.switch(n % 3, branches, key)
        own = jnp.where(w[0, 0] > 0, own, key)
        return (layer(x, w, own), jax.random.fold_in(key, n), n + 1, counts + jnp.uint32(1)), None

    start = x, key, jnp.int32(0), jnp.zeros(2, jnp.uint32)
    return jax.lax.scan(body, start, weights)[0][0]


def with_words(weights: Any, x: Any, key: Any) -> Any:
    """Words of the key with a counter, a row of an array of keys, and keys of a vmapped split."""
    words = jax.random.key_data(key) + jnp.array([0, 1], jnp.uint32)
    x = layer(x, weights[0], jax.random.wrap_key_data(words))
    keys = jax.vmap(jax.random.split)(jax.random.split(key, 3))
    keys = keys.at[1].set(jax.random.split(key)).reshape(6, *key.shape)
    place = jnp.argmax(weights[0, 0])
    x = layer(x, weights[1], jnp.take(keys, place % 2, axis=0))
    keys = jax.vmap(jax.random.fold_in)(keys, jnp.arange(6, dtype=jnp.uint32))
    return layer(
        x, weights[2], jax.lax.fori_loop(0, 2, lambda n, k: jax.random.fold_in(k, n), keys[3])
    )


@pytest.mark.parametrize("model", [switched, with_words, row_by_row])
@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_key_made_of_the_steps_key_alone_draws_for_micro_batches(
    model: Callable[..., Any], key: Any
) -> None:
    report = compare_with_jax(in_two_parts(model), W, X, key)
    assert {tensor.verdict for tensor in report.tensors} == {"equal"}


def noisy(x: Any, w: Any, shared: Any, own: Any) -> Any:
    """A layer whose weights have noise that all samples share, and with dropout."""
    return layer(x, w + jax.random.normal(shared, w.shape), own)


def noise_of_a_carried_key(weights: Any, x: Any, key: Any) -> Any:
    def body(carry: Any, w: Any) -> Any:
        x, key = carry
        key, *keys = jax.random.split(key, 3)
        return (noisy(x, w, *keys), key), None

    return jax.lax.scan(body, (x, key), weights)[0][0]


def noise_in_a_branch(weights: Any, x: Any, key: Any) -> Any:
    keys = jax.random.split(key)
    return jax.lax.cond(weights[0, 0, 0] > 9, lambda x: x, lambda x: noisy(x, weights[0], *keys), x)


@pytest.mark.parametrize("model", [noise_of_a_carried_key, noise_in_a_branch])
def test_numbers_that_samples_share_in_a_loop_are_refused_at_their_place(
    model: Callable[..., Any],
) -> None:
    line = noisy.__code__.co_firstlineno + 2
    said = r"error: random draws numbers that all samples share, in a loop or a branch"
    with pytest.raises(PlanningError, match=rf"test_keys\.py:{line}:\d+: {said}"):
        in_two_parts(model).plan(W, X, jax.random.key(0))


def noise_in_front(weights: Any, x: Any, key: Any) -> Any:
    key, shared = jax.random.split(key)
    weights = weights + jax.random.normal(shared, weights.shape)
    return in_rows(weights, x, key)


def noise_of_another_key(weights: Any, x: Any, keys: Any) -> Any:
    def body(x: Any, row: Any) -> Any:
        return noisy(x, *row), None

    return jax.lax.scan(body, x, (weights, *(jax.random.split(key, 3) for key in keys)))[0]


@pytest.mark.parametrize("model", [noise_in_front, noise_of_another_key])
def test_numbers_that_samples_share_can_be_drawn_elsewhere(model: Callable[..., Any]) -> None:
    key = jax.random.key(0)
    given = key if model is noise_in_front else (key, jax.random.key(1))
    compared = compare_with_jax(in_two_parts(model), W, X, given)
    assert len(compared.of("equal")) == len(compared.tensors), compared
