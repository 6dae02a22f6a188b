"""On Ray, too, wrong arguments are rejected before a worker is called, with the same messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.errors import JaxRuntimeError

import alpa
import alpa.runtime
from alpa.runtime import WorkerError, WorkerOptions
from alpa.runtime.argument_checks import ArgumentTypeError
from alpa.runtime.planning import PlanningError
from alpa.runtime.workers.executor import RayExecutable

pytestmark = pytest.mark.usefixtures("ray_cluster")

WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)
X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def train(w: Any, ema: Any, x: Any) -> Any:
    grad = alpa.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    new = w - 0.1 * grad
    return new, 0.9 * ema + 0.1 * new


def weights() -> tuple[jax.Array, jax.Array]:
    return jnp.full((6, 3), 0.5), jnp.full((6, 3), 0.25)


def parallelized(batches: int, donated: tuple[int, ...] = (0, 1)) -> Any:
    return alpa.parallelize(
        train,
        cluster="cpu:1x2",
        num_micro_batches=batches,
        batch_argnums=2,
        donate_argnums=donated,
        executor="ray",
        workers=WORKERS,
    )


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        bound = 1e-4 * np.max(np.abs(other))
        assert np.max(np.abs(np.asarray(one) - np.asarray(other))) <= bound


@pytest.mark.parametrize(("door", "batches"), [("parallelize", 4), ("load", 1)])
def test_arrays_that_were_given_away(door: Literal["parallelize", "load"], batches: int) -> None:
    step = parallelized(batches)
    name: Callable[[int], str] = ["w", "ema", "x"].__getitem__
    if door == "load":
        module = step.prepare(*weights(), X).plan.module
        step = alpa.runtime.load(module, executor="ray", workers=WORKERS)
        name = "argument {}".format
    w, ema = weights()
    twice = rf"Attempt to donate the same buffer twice in Execute\(\): {name(0)} and {name(1)} are"
    with pytest.raises(JaxRuntimeError, match=twice):
        step(w, w, X)
    old = step(w, ema, X)
    with pytest.raises(JaxRuntimeError, match=twice):
        step(old[0], old[0], X)
    assert not old[0].is_deleted()
    new = step(*old, X)
    deleted = rf"^Array has been deleted with shape=float32\[6,3\]: {name(0)} was donated to an"
    with pytest.raises(RuntimeError, match=deleted):
        step(*old, X)
    w.delete()
    with pytest.raises(RuntimeError, match=deleted):
        step(w, new[1], X)
    assert_close(step(*new, X), train(*train(*train(*weights(), X), X), X))


def test_what_a_loaded_program_refuses() -> None:
    step = parallelized(1, donated=())
    executable = step.executable(*weights(), X)
    assert isinstance(executable, RayExecutable)
    w, ema = weights()
    with pytest.raises(ArgumentTypeError, match=r"argument 2 is float32\[4, 6\]; expected float32"):
        executable(w, ema, X[:4])
    with pytest.raises(TypeError, match=r"argument 0 is a NoneType, not an array; expected"):
        executable(None, ema, X)
    placed = executable.place(2, X)
    with pytest.raises(ValueError, match=r"argument 0 was placed as argument 2"):
        executable(placed, ema, X)
    # Another program in the same workers.
    other = alpa.runtime.load(
        step.prepare(w, ema, X).plan.module,
        executor="ray",
        workers=WORKERS,
        beside=[executable],
    )
    assert isinstance(other, RayExecutable)
    assert other._group is executable._group
    with pytest.raises(ValueError, match=r"argument 2 was placed as argument 2 of another execut"):
        other(w, ema, placed)
    with pytest.raises(ValueError, match=r"argument 2 was placed as argument 2 of another execut"):
        alpa.runtime.load(step.prepare(w, ema, X).plan.module)(w, ema, placed)
    expected = train(w, ema, X)
    found = executable(w, ema, placed)
    assert_close(found, expected)
    # Any other executable takes an array of these workers while they live.
    local = alpa.runtime.load(step.prepare(w, ema, X).plan.module)
    assert_close(local(*found, X), train(*expected, X))
    ray.kill(executable._group._actors[0])
    with pytest.raises(WorkerError):
        np.asarray(executable(w, ema, X)[0])
    with pytest.raises(WorkerError, match=r"^argument 0 is lost with its workers: .*mesh_0 on hos"):
        local(*found, X)
    with pytest.raises(WorkerError, match=r"^w is lost with its workers: .*mesh_0 on host 0"):
        step(*found, X)
    executable.close()


def test_what_comes_back_unchanged_outlives_what_it_was() -> None:
    same = parallelized(1)
    passing = alpa.parallelize(lambda w, ema, x: (w, x @ ema), like=same)
    w, ema = same(*weights(), X)
    kept, _ = passing(w, ema, X)
    before = np.asarray(w)
    same(w, ema, X)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(w)
    np.testing.assert_array_equal(kept, before)


def test_a_state_that_is_made_with_a_print() -> None:
    """The workers would call an address in this process's memory."""

    def init() -> Any:
        jax.debug.print("a new state")
        return weights()

    with pytest.raises(
        PlanningError, match=r"test_argument_checks_ray.py:\d+:.* is a callback into Python"
    ):
        alpa.create_state(init, parallelized(1), X, argnums=(0, 1))
