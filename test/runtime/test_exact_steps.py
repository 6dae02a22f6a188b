"""Small steps with micro-batches that equal plain JAX; each was once rejected or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa import runtime
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.calls import Call, Parameters
from alpa.runtime.planning import PlanningError, run_pass

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(8, 3, 3)).astype(np.float32)
CLASSES = GENERATOR.integers(0, 3, (8, 3)).astype(np.int32)
W = GENERATOR.normal(size=(3, 3)).astype(np.float32)

Loss = Callable[[Any, Any, Any], Any]


def step_of(loss: Loss) -> Callable[..., Any]:
    def step(w: Any, x: Any, classes: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, classes)
        return w - 0.1 * gradient, value

    return step


def check_equal(step: Callable[..., Any], *arguments: Any, micro_batches: int = 2) -> None:
    planned = alpa.parallelize(
        step, cluster="cpu:1x2", num_micro_batches=micro_batches, batch_argnums=(1, 2)
    )
    check_close(planned(*arguments), jax.jit(step)(*arguments))


def check_close(found: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        bound = 1e-4 * float(np.max(np.abs(theirs)))
        difference = np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)
        assert float(np.max(np.abs(difference))) <= bound


def gram(y: Any) -> Any:
    return jnp.einsum("bij,bkj->bik", y, y) + 3 * jnp.eye(3, dtype=y.dtype)


def cholesky(w: Any, x: Any, _: Any) -> Any:
    return jnp.mean(jnp.linalg.cholesky(gram(x @ w)) ** 2)


def triangular(w: Any, x: Any, _: Any) -> Any:
    matrix = jnp.tril(w) * 0.3 + jnp.eye(3, dtype=w.dtype)
    solved = jax.vmap(lambda b: jax.scipy.linalg.solve_triangular(matrix, b, lower=True))(x)
    return jnp.mean(jnp.sin(solved))


def solve(w: Any, x: Any, _: Any) -> Any:
    return jnp.mean(jnp.linalg.solve(gram(x @ w), x) ** 2)


def fourier(w: Any, x: Any, _: Any) -> Any:
    spectrum = jnp.fft.rfft(x @ w, axis=1)
    return jnp.mean(jnp.fft.irfft(spectrum * jnp.exp(1j * spectrum.real), 3, axis=1) ** 2)


def filtered(w: Any, x: Any, _: Any) -> Any:
    """Convolves with a filter in the frequencies; its gradient is transformed back as a sum."""
    spectrum = jnp.fft.rfft(w[0]) * jnp.fft.rfft(x, axis=-1)
    return jnp.mean(jnp.sin(jnp.fft.irfft(spectrum, 3, axis=-1)))


def recurrent(w: Any, x: Any, _: Any) -> Any:
    rows = jnp.swapaxes(x, 0, 1)

    def one(h: Any, row: Any) -> tuple[Any, Any]:
        h = jnp.tanh(row + h @ w)
        return h, h

    return jnp.mean(jax.lax.scan(one, jnp.zeros_like(rows[0]), rows)[1] ** 2)


def root_of_scanned(w: Any, x: Any, classes: Any) -> Any:
    return jnp.sqrt(recurrent(w, x, classes) + 0.1)


def own_rows(w: Any, x: Any, classes: Any) -> Any:
    at = jnp.arange(x.shape[0])[:, None], classes
    return jnp.mean(jnp.sin(jnp.zeros_like(x).at[at].add(x @ w)))


def root_of_cross_entropy(w: Any, x: Any, classes: Any) -> Any:
    log_probabilities = jax.nn.log_softmax(x @ w)
    chosen = jnp.take_along_axis(log_probabilities, classes[..., None], axis=-1)
    return jnp.sqrt(0.1 - chosen.mean())


def root_of_multiplied_places(w: Any, x: Any, classes: Any) -> Any:
    """The backward part multiplies places of gradients that a function of all samples scales."""

    def multiplied(row: Any, place: Any) -> Any:
        return row.at[place].mul(row[0])

    return jnp.sqrt(jnp.mean(jnp.sin(jax.vmap(multiplied)((x @ w)[:, 0], classes[:, 0])) ** 2))


LOSSES = (
    cholesky,
    triangular,
    solve,
    fourier,
    recurrent,
    root_of_scanned,
    own_rows,
    root_of_cross_entropy,
    root_of_multiplied_places,
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_step_of_two_micro_batches_equals_plain_jax(loss: Loss) -> None:
    check_equal(step_of(loss), W, X, CLASSES)


@pytest.mark.parametrize("loss", [triangular, filtered], ids=lambda loss: loss.__name__)
def test_gradients_inside_a_loop_are_sums_behind_linear_algebra(loss: Loss) -> None:
    def step(w: Any, x: Any, classes: Any) -> Any:
        def scaled(factor: Any) -> Any:
            return jax.grad(lambda w: factor * loss(w, x, classes))(w)

        return w - 0.1 * jax.lax.map(scaled, jnp.array([1.0, 0.5])).sum(0)

    check_equal(step, W, X, CLASSES)


@pytest.mark.parametrize("loss", [cholesky, fourier], ids=lambda loss: loss.__name__)
def test_a_step_of_micro_batches_of_one_sample_equals_plain_jax(loss: Loss) -> None:
    check_equal(step_of(loss), W, X, CLASSES, micro_batches=8)


def test_a_branch_for_micro_batches_of_one_sample_equals_plain_jax() -> None:
    def step(w: Any, x: Any, classes: Any, flag: Any) -> Any:
        def loss(w: Any) -> Any:
            row = jax.lax.cond(flag > 0, jnp.sin, jnp.cos, w[:1])
            return jnp.mean(jnp.tanh(x * row) + classes[..., None])

        return w - jax.grad(loss)(w)

    check_equal(step, W, X, CLASSES, np.int32(1), micro_batches=8)


def test_counts_in_the_state_equal_plain_jax() -> None:
    def step(state: Any, x: Any, classes: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(state["w"])
        counts = state["counts"].at[classes.reshape(-1)].add(1)
        return {"w": state["w"] - gradient, "counts": counts}

    check_equal(step, {"w": W, "counts": np.array([5, 1, 2], np.int32)}, X, CLASSES)


def test_integers_that_the_size_of_the_batch_divides_equal_plain_jax() -> None:
    def step(w: Any, x: Any, classes: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
        return w - gradient, jnp.sum(classes) * (64 // len(x))

    check_equal(step, W, X, CLASSES)


def test_sums_and_rows_that_the_update_also_reads_equal_plain_jax() -> None:
    def step(w: Any, x: Any, _: Any) -> Any:
        weights = -2 * jnp.abs(x[:, 0, 0])
        total = weights.sum()
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
        return w - gradient / total, (value, total, weights)

    check_equal(step, W, X, CLASSES)


def test_a_result_that_reads_what_the_update_makes_of_a_sum_equals_plain_jax() -> None:
    def step(w: Any, x: Any, _: Any) -> Any:
        products = jnp.einsum("bij,bik->jk", x @ w, x @ w)
        negative = -products
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
        rate = (1 + jnp.abs(products).sum()) * (1 + jnp.abs(negative).sum())
        return w - gradient / rate, value + negative.sum()

    check_equal(step, W, X, CLASSES)


def flattened(loss: Loss) -> Callable[..., Any]:
    """A step that joins its gradients, one of which mixes samples, in one vector."""

    def step(state: Any, x: Any, classes: Any) -> Any:
        grads = jax.grad(lambda s: loss(s["a"], x, classes) + jnp.sin(s["b"]).mean())(state)
        flat = jnp.concatenate([grads["a"].ravel(), grads["b"].ravel()])
        rest = state["b"] - flat[9:].reshape(3, 3)
        return {"a": state["a"] - flat[:9].reshape(3, 3), "b": rest}

    return step


def test_a_mixed_gradient_stays_mixed_where_it_is_joined_with_others() -> None:
    def loss(w: Any, x: Any, _: Any) -> Any:
        y = x @ w
        return jnp.mean(jnp.tanh(y - y.mean(0)))

    planned = alpa.parallelize(
        flattened(loss), cluster="cpu:1x2", num_micro_batches=2, batch_argnums=(1, 2)
    )
    with pytest.raises(PlanningError, match="combines each sample with a"):
        planned({"a": W, "b": W}, X, CLASSES)


def test_what_jax_has_traced_before_is_refused_where_it_is_called() -> None:
    def step(w: Any, x: Any, classes: Any) -> Any:
        return jnp.cumsum(x @ w, axis=0), classes

    for _ in range(2):
        planned = alpa.parallelize(
            step, cluster="cpu:1x2", num_micro_batches=2, batch_argnums=(1, 2)
        )
        with pytest.raises(PlanningError, match=rf"{__file__}:\d+:\d+: error: "):
            planned(W, X, CLASSES)


def test_a_key_that_is_only_split_is_not_the_batch() -> None:
    def step(state: Any, x: Any, key: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(state)
        return state - gradient, jax.random.split(key)[0]

    key = np.asarray(jax.random.PRNGKey(3))
    planned = alpa.parallelize(step, cluster="cpu:1x2", num_micro_batches=2, state_argnums=0)
    found, expected = planned(W, X, key), jax.jit(step)(W, X, key)
    assert np.array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)


def test_marked_gradients_of_micro_batches_of_one_sample_equal_plain_jax() -> None:
    def step(w: Any, x: Any, classes: Any) -> Any:
        value, gradient = alpa.value_and_grad(solve)(w, x, classes)
        return w - 0.1 * gradient, value

    check_equal(step, W, X, CLASSES, micro_batches=8)


@pytest.mark.parametrize("steps", [optax.MultiSteps, optax.apply_if_finite])
def test_updates_in_a_branch_equal_plain_jax(steps: Callable[..., Any]) -> None:
    """Both parameters belong to the first layer, the counters to none."""
    optimizer = steps(optax.adam(0.1), 2)

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

        value, gradients = alpa.value_and_grad(loss)(state["params"])
        updates, new = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": new}, value

    params = {"a": np.ones((6, 4), np.float32) / 3, "b": np.ones((4, 3), np.float32)}
    state, x = {"params": params, "opt": optimizer.init(params)}, X.reshape(12, 6)[:8]
    planned = alpa.parallelize(step, cluster="cpu:1x1", num_micro_batches=2, batch_argnums=1)
    lowered = planned.lower(state, x)
    options = {"cluster": "cpu:1x1", "num-micro-batches": "2", "num-layers": "2", "processes": "0"}
    module = lowered.compiler_ir()
    run_pass("alpa", options, module, Clock())
    executable = runtime.load(module)
    call = Call.of(Parameters.of(step), (state, x), {})
    found = lowered.result(executable(*lowered.arguments(call)))
    check_close(found, jax.jit(step)(state, x))


def test_a_loop_over_chunks_that_nothing_reads_equals_plain_jax() -> None:
    """It has one trip for a micro-batch, and two for the whole batch."""

    def step(w: Any, x: Any, classes: Any) -> Any:
        rows = jnp.ones((1, 3)) + 0 * classes.sum()
        jax.lax.fori_loop(0, len(x) // 4, lambda _, rows: jax.nn.relu(rows @ w), rows)
        return step_of(lambda w, x, _: jnp.mean(jnp.tanh(x @ w) ** 2))(w, x, classes)

    check_equal(step, W, X, CLASSES)
