"""Steps whose micro-batches read counts and sizes of the whole batch equal plain JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime.planning import PlanningError

B = 8
RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


PARAMS = {"w": normal(6, 5), "v": normal(5, 3), "g": normal(5), "layers": normal(3, 5, 5) / 2}
# The first half has more samples that count than the second.
BATCH = {
    "x": normal(B, 6),
    "y": RANDOM.integers(0, 3, B).astype(np.int32),
    "m": np.array([1, 1, 1, 1, 0, 1, 0, 0], np.float32),
    "n": np.array([0.5, 0, 2, 1, 0, 0, 0, 0.25], np.float32),
}
KEY = jax.random.key(0)
Tree = Any
Loss = Callable[[Tree, Tree], Any]


def terms(p: Tree, b: Tree) -> tuple[Any, Any]:
    """Two losses of each sample, which share activations."""
    hidden = jnp.tanh(b["x"] @ p["w"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ p["v"], b["y"])
    return losses, jax.nn.sigmoid(hidden * p["g"]).sum(1)


def masked_and_plain(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * b["m"]).sum() / b["m"].sum() + 0.01 * extra.mean()


def two_masks(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * b["m"]).sum() / b["m"].sum() + (extra * b["n"]).sum() / b["n"].sum()


def at_least_one(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    mask = b["y"] != 0
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1) + extra.mean()


def none_counts(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    mask = b["y"] > 99
    return (losses * mask).sum() / jnp.maximum(mask.sum(), 1) + extra.mean()


def with_metrics(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    first = (losses * b["m"]).sum() / b["m"].sum()
    second = (extra * b["n"]).sum() / jnp.maximum(b["n"].sum(), 1)
    return first + second, {"first": first, "second": second, "count": b["m"].sum()}


def normalised_weights(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * (b["m"] / b["m"].sum())).sum() + (extra * (b["n"] / b["n"].max())).mean()


def mean_and_sum(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return losses.mean() + 0.01 * extra.sum() + extra.sum() / jnp.sqrt(extra.shape[0])


def in_layers(p: Tree, b: Tree) -> Any:
    """Each layer of a loop has a loss of its own."""

    def layer(h: Any, w: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h @ w)
        return h, (jax.nn.softmax(h)[:, 0] ** 2).mean()

    hidden, extra = jax.lax.scan(layer, b["x"] @ p["w"], p["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ p["v"], b["y"])
    return (losses * b["m"]).sum() / b["m"].sum() + 0.01 * extra.mean()


def by_numbers_of_samples(p: Tree, b: Tree) -> Any:
    """The count reads what a sample's place in the batch is."""
    losses, extra = terms(p, b)
    weight = (b["m"] * jnp.arange(b["m"].shape[0])).sum() + b["n"][0]
    return (losses * b["m"]).sum() / weight + extra.mean()


EXACT: dict[str, tuple[Loss, bool]] = {
    "a masked mean and a mean": (masked_and_plain, False),
    "two masked means": (two_masks, False),
    "at least one": (at_least_one, False),
    "no sample counts": (none_counts, False),
    "metrics": (with_metrics, True),
    "normalised weights": (normalised_weights, False),
    "a mean and a sum": (mean_and_sum, False),
    "a loss of each layer": (in_layers, False),
    "numbers of samples in a count": (by_numbers_of_samples, False),
}


def sgd(loss: Loss, *, has_aux: bool = False) -> Callable[[Tree, Tree], Any]:
    optimizer = optax.sgd(0.1)

    def step(params: Tree, batch: Tree) -> Any:
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return optax.apply_updates(params, updates), value

    return step


def parallelize(step: Callable[..., Any], number: int = 2, **options: Any) -> Any:
    options = {"cluster": "cpu:1x2", "batch_argnums": 1, **options}
    return alpa.parallelize(step, num_micro_batches=number, **options)


def assert_equal(found: Tree, expected: Tree) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("number", [2, B])
@pytest.mark.parametrize("name", EXACT)
def test_losses_of_several_divisors_equal_plain_jax(name: str, number: int) -> None:
    loss, has_aux = EXACT[name]
    step = sgd(loss, has_aux=has_aux)
    planned = parallelize(step, number)
    assert_equal(planned(PARAMS, BATCH), jax.jit(step)(PARAMS, BATCH))
    assert "micro-batches: exact (proven)" in str(planned.prepare(PARAMS, BATCH).plan)


def test_a_program_that_is_exact_without_them_reads_no_number_of_the_whole_batch() -> None:
    def step(p: Tree, b: Tree) -> Any:
        return sgd(lambda p, b: (terms(p, b)[0] * b["m"]).sum() / b["m"].sum())(p, b)

    assert parallelize(step).lower(PARAMS, BATCH).whole == ()
    # The arguments are g, layers, v, w of the parameters, then m, n, x, y.
    assert parallelize(sgd(masked_and_plain)).lower(PARAMS, BATCH).whole == (4,)


def test_samples_that_are_read_twice_can_be_placed_ahead() -> None:
    step = sgd(two_masks)
    planned, plain = parallelize(step, cluster="cpu:2x1", num_stages=2), jax.jit(step)
    ours, theirs = PARAMS, PARAMS
    for batch in alpa.runtime.prefetch(planned, [BATCH] * 3):
        (ours, loss), (theirs, expected) = planned(ours, batch), plain(theirs, BATCH)
        assert_equal((ours, loss), (theirs, expected))


def over_losses(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * b["m"]).sum() / jax.lax.stop_gradient(extra.sum()) + extra.mean()


def batch_norm(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    extra = (extra - extra.mean()) / extra.std()
    return (losses * b["m"]).sum() / b["m"].sum() + (extra**3).mean()


def largest(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * b["m"]).sum() / b["m"].sum() + extra.max()


def weighted_by_number(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses * jnp.arange(losses.shape[0])).sum() / b["m"].sum() + extra.mean()


def running_count(p: Tree, b: Tree) -> Any:
    losses, extra = terms(p, b)
    return (losses / (1 + b["m"].cumsum())).sum() + extra.mean()


REFUSED: dict[str, tuple[Loss, str]] = {
    "a divisor made of parameters": (over_losses, "divide makes a function of all samples"),
    "a batch norm": (batch_norm, "combines each sample with a value computed from all samples"),
    "a maximum of losses": (largest, "takes the maximum over the samples"),
    "numbers of samples": (weighted_by_number, "arange"),
    "a running count": (running_count, "reduces over neighbouring samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_numbers_of_the_batch_is_refused(name: str) -> None:
    loss, said = REFUSED[name]
    with pytest.raises(PlanningError, match=rf"\.py:\d+:\d+: error: .*({said})"):
        parallelize(sgd(loss))(PARAMS, BATCH)


def test_a_count_of_random_numbers_is_refused() -> None:
    def step(p: Tree, b: Tree, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, (b["x"].shape[0],))
        return sgd(lambda p, b: masked_and_plain(p, {**b, "m": mask.astype(np.float32)}))(p, b)

    with pytest.raises(PlanningError, match="divide makes a function of all samples"):
        parallelize(step)(PARAMS, BATCH, KEY)


def test_random_numbers_beside_a_count() -> None:
    def step(p: Tree, b: Tree, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, b["x"].shape)
        return sgd(masked_and_plain)(p, {**b, "x": b["x"] * kept})

    compared = alpa.compare_with_jax(parallelize(step), PARAMS, BATCH, KEY)
    assert len(compared.of("equal")) == len(compared.tensors), compared
