"""Plans, functions and loaded programs end on request, with their workers."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
import alpa.runtime
from alpa.runtime import WorkerError, WorkerOptions

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def train(w: Any, x: Any) -> Any:
    return w - 0.1 * alpa.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def weights() -> jax.Array:
    return jnp.full((6, 3), 0.5)


def parallelized(executor: Literal["local", "ray"]) -> Any:
    return alpa.parallelize(
        train,
        cluster="cpu:1x2",
        batch_argnums=1,
        executor=executor,
        workers=WorkerOptions(cache_directory=None, timeout_seconds=300)
        if executor == "ray"
        else None,
    )


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


def groups_of_workers() -> set[str]:
    """The placement groups that Ray holds."""
    from ray.util.placement_group import placement_group_table  # noqa: PLC0415 - Ray is slow

    groups = placement_group_table()
    return {key for key, group in groups.items() if group["state"] != "REMOVED"}


def test_a_call_after_the_end_compiles_the_same_plan_again() -> None:
    step = parallelized("local")
    with step:
        w = step(weights(), X)
        executable, plan = step.executable(w, X), step.prepare(w, X).plan
    with pytest.raises(RuntimeError, match=r"^the executable is closed; load the plan again$"):
        executable(w, X)
    with pytest.raises(RuntimeError, match="the executable is closed"):
        executable.place(1, X)
    assert_close(step(w, X), train(train(weights(), X), X))  # arrays in this process stay
    assert step.prepare(w, X).plan is plan
    again = step.executable(w, X)
    assert again is not executable
    with plan as entered:
        assert entered is plan
    with pytest.raises(RuntimeError, match="the executable is closed"):
        again(w, X)


def test_a_plan_that_is_not_compiled_or_forgotten_has_nothing_to_end() -> None:
    step = parallelized("local")
    plan = step.prepare(weights(), X).plan
    plan.close()
    del step
    plan.close()


def test_a_loaded_program_ends(moves: str) -> None:
    with alpa.runtime.load(moves) as step:
        assert not step.is_stopped
    assert step.is_stopped
    with pytest.raises(RuntimeError, match="the executable is closed"):
        step(*(np.ones(4, np.float32),) * 3, np.ones(12, np.float32))


@pytest.mark.usefixtures("ray_cluster")
def test_the_workers_of_a_function_end_and_a_later_call_starts_new_ones() -> None:
    before = groups_of_workers()
    step = parallelized("ray")
    evaluate = alpa.parallelize(loss, like=step, batch_argnums=1)
    with step:
        w = step(weights(), X)
        assert_close(evaluate(w, X), loss(train(weights(), X), X))
        assert len(groups_of_workers() - before) == 1
    assert groups_of_workers() == before
    lost = r"^w is lost with its workers: the executable is closed; .* \(alpa\.resume\), or create"
    for function in (step, evaluate):
        with pytest.raises(WorkerError, match=lost):
            function(w, X)
    with pytest.raises(WorkerError, match="the executable is closed"):
        np.asarray(w)
    w = step(weights(), X)
    assert_close(w, train(weights(), X))
    assert_close(evaluate(w, X), loss(train(weights(), X), X))  # in the new workers
    step.prepare(w, X).plan.close()
    assert groups_of_workers() == before
