"""Batches are placed ahead of their steps, and steps leave them unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
import alpa.runtime
from alpa.runtime import Executable, WorkerOptions, prefetch
from alpa.runtime.argument_checks import Placed


def check(step: Executable, moves: str) -> None:
    """Three steps of the program of `moves`; argument 3 is a batch, 0 and 1 are states."""
    generator = np.random.default_rng(0)
    c, p, k = (generator.normal(size=4).astype(np.float32) for _ in range(3))
    xs = [generator.normal(size=12).astype(np.float32) for _ in range(3)]
    reference = alpa.runtime.load(moves)
    state, expected = [c, p], [c, p]
    taken: list[int] = []

    def batches() -> Iterator[dict[int, np.ndarray]]:
        for number, x in enumerate(xs):
            taken.append(number)
            yield {3: x}

    for number, batch in enumerate(prefetch(step, batches(), ahead=1)):
        assert len(taken) == min(3, number + 2)
        assert (batch[3].shape, batch[3].dtype) == ((12,), np.float32)
        step(*state, k, batch[3])  # the batch is there for another step
        results = step(*state, k, batch[3])
        wanted = reference(*expected, k, xs[number])
        for result, it in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, it)
        state, expected = list(results[:2]), list(wanted[:2])
    with pytest.raises(ValueError, match=r"argument 2 .* placed as argument 3"):
        step(*state, batch[3], xs[0])
    with pytest.raises(ValueError, match=r"argument 3 is float32\[4\]; expected float32\[12\]"):
        step.place(3, xs[0][:4])
    with pytest.raises(ValueError, match="no argument 4"):
        step.place(4, xs[0])


def test_on_local_meshes(moves: str) -> None:
    check(alpa.runtime.load(moves), moves)


@pytest.mark.slow  # batches of a function are placed on Ray in the default tier
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray(moves: str) -> None:
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    with alpa.runtime.load(moves, executor="ray", workers=workers) as step:
        check(step, moves)
        assert sum(step.held_bytes().values()) == 0  # states and batches are collected


def test_what_a_step_overwrites_is_not_placed(moves: str) -> None:
    donating = moves.replace(
        "alpa.input = 1 : i64,", "alpa.input = 1 : i64, jax.buffer_donor = true,"
    )
    step = alpa.runtime.load(donating)
    with pytest.raises(ValueError, match="argument 1 is donated to each step and cannot be placed"):
        step.place(1, np.zeros(4, np.float32))


def test_a_negative_number_ahead(moves: str) -> None:
    with pytest.raises(ValueError, match="ahead is -1; expected a whole number of at least 0"):
        next(prefetch(alpa.runtime.load(moves), [], ahead=-1))


def train_step(weights: Any, batch: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ weights) - batch["y"]) ** 2) * batch["scale"]

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return weights - 0.1 * grads, loss


def check_function(**options: Any) -> None:
    """Three steps of a function; batches are placed once the first call has planned it."""
    generator = np.random.default_rng(0)
    draw = partial(generator.normal, size=(8, 6))
    batches = [{"x": draw(), "y": draw(), "scale": 0.5} for _ in range(4)]
    batches[3] = {"x": draw()[:4], "y": draw()[:4], "scale": 0.5}  # of another shape
    step = alpa.parallelize(
        train_step, cluster="cpu:1x2", num_micro_batches=2, donate_argnums=0, **options
    )
    expected, found = jnp.full((6, 6), 0.1), jnp.full((6, 6), 0.1)
    placed: list[bool] = []
    with step:
        for batch, wanted in zip(prefetch(step, batches), batches, strict=True):
            placed.append(isinstance(batch["x"], Placed))
            assert placed[-1] == isinstance(batch["y"], Placed)
            assert batch["scale"] == 0.5  # a Python number stays one
            found, loss = step(found, batch)
            expected, expected_loss = jax.jit(train_step)(expected, wanted)
            np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4)
    assert placed == [False, True, True, False]


def test_of_a_function_on_local_meshes() -> None:
    check_function()


@pytest.mark.usefixtures("ray_cluster")
def test_of_a_function_on_ray() -> None:
    check_function(executor="ray", workers=WorkerOptions(cache_directory=None, timeout_seconds=300))


def test_of_a_function_with_several_batch_arguments() -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((x @ weights - y) ** 2)

    step = alpa.parallelize(loss, cluster="cpu:1x2", batch_argnums=("x", "y"))
    weights, x, y = np.ones((6, 6)), np.ones((8, 6)), np.zeros((8, 6))
    step.plan(weights, x, y)
    (batch,) = prefetch(step, [(x, y)])
    assert all(isinstance(it, Placed) for it in batch)
    np.testing.assert_allclose(step(weights, *batch), 36)
    with pytest.raises(TypeError, match=r"takes samples in x, y; a batch is a tuple of"):
        next(prefetch(step, [x]))
    with pytest.raises(ValueError, match=r"^y was placed for another argument or step"):
        step(weights, x, batch[0])
    other = alpa.parallelize(loss, cluster="cpu:1x2", batch_argnums=("x", "y"))
    with pytest.raises(ValueError, match=r"^x was placed for another argument or step"):
        other(weights, *batch)


def test_what_takes_no_batches_is_refused() -> None:
    step = alpa.parallelize(lambda x, y: jnp.sum(x) + jnp.sum(y), cluster="cpu:1x2")
    step.plan(np.ones((8, 6)), np.ones(3))
    with pytest.raises(ValueError, match=r"unknown which arguments of <lambda> hold samples"):
        next(prefetch(step, [np.ones((8, 6))]))
    with pytest.raises(TypeError, match=r"expected a function that alpa\.parallelize returned"):
        prefetch(jax.jit(train_step), [])  # pyright: ignore
