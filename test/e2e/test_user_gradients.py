"""Gradients wherever users take them: in loops, branches and maps, several of them, or none.

Each program equals plain JAX with two micro-batches, or is rejected with a remedy that works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import alpa
from alpa.runtime.planning import PlanningError

R = np.random.default_rng(1)


def normal(*shape: int) -> np.ndarray:
    return R.normal(size=shape).astype(np.float32)


X, Y = normal(8, 6), R.integers(0, 3, 8).astype(np.int32)
W = normal(6, 3) / 2
Step = Callable[..., Any]


def numbers(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


def assert_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = numbers(ours), numbers(theirs)
        assert ours.shape == theirs.shape
        bound = 1e-4 * max(float(np.max(np.abs(theirs))), 1e-3)
        assert float(np.max(np.abs(ours - theirs))) <= bound


def parallelize(step: Step, number: int, **options: Any) -> Any:
    return alpa.parallelize(step, cluster="cpu:1x2", num_micro_batches=number, **options)


def squares(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def entropy(w: Any, x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ w), y).mean()


def in_a_branch(state: Any, x: Any) -> Any:
    """One loss in even steps, another loss in odd steps."""
    g = jax.lax.cond(
        state["count"] % 2 == 0,
        lambda w: jax.grad(squares)(w, x),
        lambda w: jax.grad(lambda w: jnp.mean(jnp.abs(x @ w)))(w),
        state["w"],
    )
    return {"w": state["w"] - 0.1 * g, "count": state["count"] + 1}


def of_many_models(w: Any, x: Any) -> Any:
    losses, g = jax.vmap(jax.value_and_grad(squares), (0, None))(w, x)
    return w - 0.1 * g, losses


def in_turn_of_many_models(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.lax.map(lambda each: jax.grad(squares)(each, x), w)


def of_single_samples(w: Any, x: Any, y: Any) -> Any:
    """Private SGD: the gradient of each sample is clipped."""
    g = jax.vmap(jax.grad(entropy), (None, 0, 0))(w, x, y)
    norms = jnp.sqrt(jnp.sum(g**2, (1, 2)))
    g = g * jnp.minimum(1, 0.3 / norms)[:, None, None]
    return w - 0.1 * g.mean(0), norms


def of_single_samples_in_turn(w: Any, x: Any, y: Any) -> Any:
    g = jax.lax.map(lambda sample: jax.grad(entropy)(w, *sample), (x, y))
    return w - 0.1 * g.mean(0)


def newton(w: Any, x: Any) -> Any:
    """Second derivatives along a direction."""
    gradient = jax.grad(squares)
    g, curved = jax.jvp(lambda w: gradient(w, x), (w,), (jnp.ones_like(w),))
    return w - 0.1 * g / (1 + jnp.abs(curved))


def of_layers_computed_once_more(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        layer = jax.checkpoint(lambda h, a: (jnp.tanh(h @ a), None))
        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    loss, g = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, loss


def means_of_clusters(centers: Any, x: Any) -> Any:
    """k-means, without a gradient."""
    distances = jnp.sum((x[:, None] - centers) ** 2, -1)
    nearest = jax.nn.one_hot(jnp.argmin(distances, -1), 3)
    counts = nearest.sum(0)
    means = nearest.T @ x / jnp.maximum(counts, 1)[:, None]
    return jnp.where(counts[:, None] > 0, means, centers), jnp.argmin(distances, -1)


def clipped_ratios(state: Any, x: Any, y: Any, advantage: Any, old: Any) -> Any:
    """PPO's loss, with an entropy and a value loss."""

    def loss_fn(w: Any, v: Any) -> Any:
        logs = jax.nn.log_softmax(x @ w)
        ratio = jnp.exp(jnp.take_along_axis(logs, y[:, None], 1)[:, 0] - old)
        clipped = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        spread = -jnp.sum(jnp.exp(logs) * logs, -1)
        return -clipped.mean() - 0.01 * spread.mean() + 0.5 * jnp.mean((x @ v - advantage) ** 2)

    loss, (g, h) = jax.value_and_grad(loss_fn, (0, 1))(state["w"], state["v"])
    return {"w": state["w"] - 0.1 * g, "v": state["v"] - 0.1 * h}, loss


def normalised_advantage(state: Any, x: Any, y: Any, advantage: Any, old: Any) -> Any:
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    return clipped_ratios(state, x, y, advantage, old)


def boundary_in_a_loop(w: Any, x: Any) -> Any:
    def layer(h: Any, a: Any) -> Any:
        h = jnp.tanh(h @ a)
        alpa.mark_layer_boundary()
        return h, None

    loss, g = alpa.value_and_grad(lambda w: jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2))(w)
    return w - 0.1 * g, loss


def of_an_optimizer(optimizer: Any) -> Step:
    def step(w: Any, state: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(squares)(w, x)
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state, loss

    return step


PPO = ({"w": W, "v": normal(6)}, X, Y, normal(8), np.log(np.full(8, 1 / 3, np.float32)))
EXACT: dict[str, tuple[Step, tuple[Any, ...], dict[str, Any]]] = {
    "in a branch": (in_a_branch, ({"w": W, "count": np.int32(1)}, X), {}),
    "of many models": (of_many_models, (normal(4, 6, 3), X), {}),
    "in turn of many models": (in_turn_of_many_models, (normal(4, 6, 3), X), {}),
    "of single samples": (of_single_samples, (W, X, Y), {}),
    "second derivatives": (newton, (W, X), {}),
    "of layers computed once more": (of_layers_computed_once_more, (normal(3, 6, 6) / 2, X), {}),
    "none: means of clusters": (means_of_clusters, (normal(3, 6), X), {}),
    "clipped ratios": (clipped_ratios, PPO, {}),
    "normalised advantage": (normalised_advantage, PPO, {}),
    "boundary in a loop": (boundary_in_a_loop, (normal(3, 6, 6) / 2, X), {}),
    **{
        name: (of_an_optimizer(optimizer), (W, optimizer.init(W), X), {"batch_argnums": 2})
        for name, optimizer in (
            ("schedule-free", contrib.schedule_free_sgd(0.1, warmup_steps=2)),
            ("quasi-Newton", optax.chain(optax.scale_by_lbfgs(3), optax.scale(-0.1))),
            ("noise in the update", optax.chain(optax.add_noise(0.01, 0.5, 0), optax.sgd(0.1))),
            ("by hand", optax.chain(optax.scale_by_belief(), optax.scale(-0.01))),
        )
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_two_micro_batches_give_what_the_whole_batch_gives(name: str) -> None:
    step, arguments, options = EXACT[name]
    assert_equal(parallelize(step, 2, **options)(*arguments), jax.jit(step)(*arguments))


def test_slow_weights_that_synchronise() -> None:
    """Lookahead: two sets of parameters in the state."""
    optimizer = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)

    def step(params: Any, state: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(squares)(params.fast, x)
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = optax.LookaheadParams.init_synced(W)
    planned = parallelize(step, 2, batch_argnums=2)
    ours = theirs = (params, optimizer.init(params))
    for _ in range(2):
        ours, theirs = planned(*ours, X), jax.jit(step)(*theirs, X)
        assert_equal(ours, theirs)
        ours, theirs = ours[:2], theirs[:2]


def epochs(w: Any, x: Any) -> Any:
    """Several updates in one step, each with a gradient of all samples."""

    def once(w: Any, _: Any) -> Any:
        loss, g = jax.value_and_grad(squares)(w, x)
        return w - 0.1 * g, loss

    return jax.lax.scan(once, w, length=3)


def until_small(w: Any, x: Any) -> Any:
    """The loss decides the number of updates."""

    def once(state: Any) -> Any:
        w, count = state
        return w - 0.5 * jax.grad(squares)(w, x), count + 1

    return jax.lax.while_loop(lambda s: (squares(s[0], x) > 0.2) & (s[1] < 5), once, (w, 0))


def sharp(w: Any, x: Any) -> Any:
    """SAM: the gradient where the loss is largest nearby."""
    g = jax.grad(squares)(w, x)
    loss, g = jax.value_and_grad(squares)(w + 0.05 * g / jnp.linalg.norm(g), x)
    return w - 0.1 * g, loss


def sharp_and_scaled(
    state: Any, x: Any, *, first: Any = jax.grad, second: Any = jax.value_and_grad
) -> Any:
    """With a learned scale: its gradient is a value that the loss is computed from."""

    def scaled(state: Any) -> Any:
        return state["scale"] * squares(state["w"], x)

    g = first(scaled)(state)
    norm = optax.tree.norm(g)
    loss, g = second(scaled)(jax.tree.map(lambda a, b: a + 0.5 * b / norm, state, g))
    return jax.tree.map(lambda a, b: a - 0.1 * b, state, g), loss, norm


def one_after_the_other(state: Any, x: Any) -> Any:
    """The second network learns from the first one's new state."""
    loss, g = alpa.value_and_grad(lambda a: squares(a, x @ state["b"]))(state["a"])
    a = state["a"] - 0.1 * g
    h = alpa.grad(lambda b: squares(a, x @ b))(state["b"])
    return {"a": a, "b": state["b"] - 0.1 * h}, loss


def searched(w: Any, state: Any, x: Any) -> Any:
    """L-BFGS with its line search, which computes the loss at several points."""
    optimizer = optax.lbfgs(memory_size=3)

    def value(w: Any) -> Any:
        return squares(w, x)

    loss, g = jax.value_and_grad(value)(w)
    updates, state = optimizer.update(g, state, w, value=loss, grad=g, value_fn=value)
    return optax.apply_updates(w, updates), state, loss


SAID = {"batch_argnums": 1, "state_argnums": 0}
REFUSED: dict[str, tuple[Step, tuple[Any, ...], dict[str, Any], str]] = {
    "of single samples in turn": (of_single_samples_in_turn, (W, X, Y), {}, "mean"),
    "epochs": (epochs, (W, X), SAID, "in turn"),
    "until small": (until_small, (W, X), SAID, "in turn"),
    "sharpness": (sharp, (W, X), {}, "mean"),
    "one after the other": (one_after_the_other, ({"a": W, "b": normal(6, 6)}, X), {}, ""),
    "line search": (
        searched,
        (W, optax.lbfgs(memory_size=3).init(W), X),
        {"batch_argnums": 2},
        "",
    ),
}
"""With what independent micro-batches give: the mean of their steps, or, of a state that the
forward part writes, one step after the other."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_with_samples_again_is_refused_and_the_remedy_works(name: str) -> None:
    step, arguments, options, independent = REFUSED[name]
    with pytest.raises(PlanningError) as refused:
        parallelize(step, 2, **options)(*arguments)
    first = str(refused.value)
    assert ("micro-batches=independent" in first) == bool(independent)
    assert "2 micro-batches would not give what the whole batch gives" in first
    assert "plan with 1 micro-batch" in first
    assert ".py:" in first
    assert_equal(parallelize(step, 1, **options)(*arguments), jax.jit(step)(*arguments))


@pytest.mark.parametrize("name", [name for name in REFUSED if REFUSED[name][3]])
def test_independent_micro_batches_are_batches_of_their_own(name: str) -> None:
    step, (state, *batch), options, how = REFUSED[name]
    found = parallelize(step, 2, micro_batches="independent", **options)(state, *batch)
    first, second = zip(*(np.split(array, 2) for array in batch), strict=True)
    one = jax.jit(step)(state, *first)
    two = jax.jit(step)(one[0] if how == "in turn" else state, *second)
    if how == "in turn":
        assert_equal(found[0], two[0])  # of other results: the mean, or the sum of integers
    else:
        assert_equal(found, jax.tree.map(lambda a, b: (a + b) / 2, one, two))


@pytest.mark.parametrize("name", [name for name in REFUSED if not REFUSED[name][3]])
def test_steps_that_read_what_the_update_made_cannot_be_independent(name: str) -> None:
    step, arguments, options, _ = REFUSED[name]
    with pytest.raises(PlanningError, match=r"\.py:\d+:\d+: error: .* or plan with 1 micro-batch"):
        parallelize(step, 2, micro_batches="independent", **options)(*arguments)


SCALED = {"w": W, "scale": np.float32(1.5)}


@pytest.mark.parametrize("second", [jax.value_and_grad, alpa.value_and_grad])
def test_the_gradients_of_the_update_are_told_from_others(second: Any) -> None:
    def step(state: Any, x: Any) -> Any:
        return sharp_and_scaled(state, x, second=second)[:2]

    assert_means_of_steps(step)


def assert_means_of_steps(step: Step) -> None:
    found = parallelize(step, 2, micro_batches="independent")(SCALED, X)
    one, two = (jax.jit(step)(SCALED, x) for x in np.split(X, 2))
    assert_equal(found, jax.tree.map(lambda a, b: (a + b) / 2, one, two))


@pytest.mark.parametrize("case", ["all are marked", "what is differentiated again is returned"])
def test_gradients_that_are_not_of_the_update_need_no_mark(case: str) -> None:
    if case == "all are marked":
        ways = {"first": alpa.grad, "second": alpa.value_and_grad}
    else:
        ways = {"first": jax.grad, "second": jax.value_and_grad}

    with pytest.raises(PlanningError, match=r"\.py:.*mark those, and no others, by alpa.grad"):
        parallelize(partial(sharp_and_scaled, **ways), 2, micro_batches="independent")(SCALED, X)
    assert_means_of_steps(partial(sharp_and_scaled, second=alpa.value_and_grad))


def test_a_penalty_of_the_gradients_of_parameters() -> None:
    """It needs 1 micro-batch, or independent ones, in several stages, too."""
    params = {"v": normal(6, 6) / 2, "b": normal(6), "w": W}

    def loss(params: Any, x: Any, y: Any) -> Any:
        return entropy(params["w"], jnp.tanh(x @ params["v"] + params["b"]), y)

    def penalised(params: Any, x: Any, y: Any) -> Any:
        return loss(params, x, y) + optax.tree.norm(jax.grad(loss)(params, x, y))

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = alpa.value_and_grad(penalised)(params, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    expected = jax.jit(step)(params, X, Y)
    for stages in (1, 2):
        assert_equal(parallelize(step, 1, num_stages=stages)(params, X, Y), expected)
    found = parallelize(step, 2, num_stages=2, micro_batches="independent")(params, X, Y)
    halves = (jax.jit(step)(params, X[half], Y[half]) for half in (slice(0, 4), slice(4, 8)))
    assert_equal(found, jax.tree.map(lambda a, b: (a + b) / 2, *halves))


def test_noise_in_loops_in_loops() -> None:
    """Dropout in layers of a scan in a scan, with split keys."""

    def step(w: Any, x: Any, key: Any) -> Any:
        def inner(h: Any, given: Any) -> Any:
            a, key = given
            return jnp.tanh(h @ a) * jax.random.bernoulli(key, 0.8, h.shape), None

        def outer(h: Any, given: Any) -> Any:
            a, key = given
            return jax.lax.scan(inner, h, (a, jax.random.split(key, 2)))[0], None

        def loss_fn(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(outer, x, (w, jax.random.split(key, 3)))[0] ** 2)

        loss, g = alpa.value_and_grad(loss_fn)(w)
        return w - 0.1 * g, loss

    w, key = normal(3, 2, 6, 6) / 2, jax.random.key(3)
    planned = parallelize(step, 2)
    assert planned.prepare(w, X, key).plan.micro_batches == "exact, random numbers per micro-batch"
    found, halves = planned(w, X, key), np.split(X, 2)
    steps = [step(w, half, jax.random.fold_in(key, m)) for m, half in enumerate(halves)]
    assert_equal(found, jax.tree.map(lambda *each: sum(each) / 2, *steps))


def of_mean(hidden: Any) -> Any:
    return jnp.mean(jnp.tanh(hidden))


def of_sum(hidden: Any) -> Any:
    return jnp.sum(hidden**2)


def over_level(hidden: Any) -> Any:
    return jnp.sum(hidden**2) / jax.lax.stop_gradient(jnp.abs(hidden).sum())


def terms_together(w: Any, x: Any, *terms: Any) -> Any:
    def loss(w: Any) -> Any:
        hidden = x @ w
        return sum(term(hidden) for term in terms)

    return w - 0.1 * jax.grad(loss)(w)


def terms_apart(w: Any, x: Any, *terms: Any) -> Any:
    return w - 0.1 * sum(jax.grad(lambda w, term=term: term(x @ w))(w) for term in terms)


def in_a_loop(w: Any, x: Any) -> Any:
    def scaled(factor: Any) -> Any:
        return jax.grad(lambda w: over_level(factor * (x @ w)))(w)

    return w - 0.1 * jax.lax.map(scaled, jnp.array([1.0, 0.5])).sum(0)


def sums_in_a_loop(w: Any, x: Any) -> Any:
    def scaled(factor: Any) -> Any:
        return factor * jax.grad(lambda w: of_sum(x @ w))(w)

    grads = jax.lax.map(scaled, jnp.array([1.0, 0.5])).sum(0)
    return w - 0.1 * grads / jnp.abs(x @ w).sum()


DIVISORS: dict[str, tuple[Step, Step, str, str]] = {
    "terms of a loss": (
        lambda w, x: terms_together(w, x, of_mean, over_level),
        lambda w, x: terms_apart(w, x, of_mean, over_level),
        "divide makes a function of all samples, and add",
        "if these are terms of a loss, differentiate them apart and add the gradients",
    ),
    "in a loop": (
        in_a_loop,
        sums_in_a_loop,
        "divide computes with a function of all samples inside a loop",
        "move that out of the loop",
    ),
}
"""A refused step that divides in `over_level`, one that computes the same and is exact, what the
error says of the first, and the remedy."""


@pytest.mark.parametrize("name", DIVISORS)
def test_a_refused_divisor_is_named_and_the_remedy_works(name: str) -> None:
    refused, exact, what, remedy = DIVISORS[name]
    with pytest.raises(PlanningError) as error:
        parallelize(refused, 2)(W, X)
    text = str(error.value)
    assert what in text
    assert remedy in text
    assert f"{__file__}:{over_level.__code__.co_firstlineno + 1}:" in text
    found = parallelize(exact, 2)(W, X)
    assert_equal(found, jax.jit(exact)(W, X))
    assert_equal(found, jax.jit(refused)(W, X))
