"""Updates that read values of the forward part: they see the loss that the caller sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.planning import PlanningError
from alpa.runtime.reference import compare

Loss = Callable[[Any, Any], Any]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) / 2


PARAMS = {"a": _normal(4, 8), "b": _normal(8, 8), "c": _normal(8, 4)}
BATCH = {"x": _normal(16, 4), "y": _normal(16, 4) + 1}


def errors(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["a"])
    alpa.mark_layer_boundary()
    return (jnp.tanh(h @ params["b"]) @ params["c"] - batch["y"]) ** 2


def mean(params: Any, batch: Any) -> Any:
    return jnp.mean(errors(params, batch))


def total(params: Any, batch: Any) -> Any:
    return jnp.sum(errors(params, batch))


def step_of(loss: Loss, *, returned: bool = True, value_and_grad: Any = alpa.value_and_grad) -> Any:
    """Gradient descent with a rate that depends on the loss."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(params, batch)
        rate = jnp.where(value < 1e6, 0.05 * value / (1 + value), 0)
        params = jax.tree.map(lambda w, g: w - rate * g, params, grads)
        return (params, value) if returned else params

    return step


def polyak(params: Any, batch: Any) -> Any:
    """A rate of the loss and of the gradients."""
    value, grads = jax.value_and_grad(mean)(params, batch)
    rate = 0.01 * value / jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda w, g: w - rate * g, params, grads), value


def parallelize(step: Any, **options: Any) -> Any:
    return alpa.parallelize(
        step,
        cluster="cpu:2x2",
        num_micro_batches=4,
        state_argnums=0,
        batch_argnums=1,
        mesh_shape="1x2",
        inter="equal-layers",
        **options,
    )


@pytest.mark.parametrize("value_and_grad", [alpa.value_and_grad, jax.value_and_grad])
@pytest.mark.parametrize(("loss", "reduction"), [(mean, "mean"), (total, "sum")])
def test_an_update_reads_the_loss_of_the_whole_batch(
    loss: Loss, reduction: str, value_and_grad: Any
) -> None:
    step = step_of(loss, value_and_grad=value_and_grad)
    found = parallelize(step, loss_reduction=reduction)(PARAMS, BATCH)
    rows = compare(jax.tree.leaves(found), jax.tree.leaves(step(PARAMS, BATCH)))
    assert all(row.error <= row.bound for row in rows), rows


def test_an_update_reads_the_loss_and_the_norm_of_the_gradients() -> None:
    found = parallelize(polyak)(PARAMS, BATCH)
    rows = compare(jax.tree.leaves(found), jax.tree.leaves(polyak(PARAMS, BATCH)))
    assert all(row.error <= row.bound for row in rows), rows


@pytest.mark.parametrize("value_and_grad", [alpa.value_and_grad, jax.value_and_grad])
def test_a_parameter_of_one_number_has_a_rate_of_one_number(value_and_grad: Any) -> None:
    """The mark tells them apart, and the larger parameters, which have the same rate."""

    def scaled(params: Any, batch: Any) -> Any:
        return jnp.mean(params["scale"] * errors(params, batch))

    step = step_of(scaled, value_and_grad=value_and_grad)
    params = {**PARAMS, "scale": np.float32(1.25)}
    rows = compare(
        jax.tree.leaves(parallelize(step)(params, BATCH)), jax.tree.leaves(step(params, BATCH))
    )
    assert all(row.error <= row.bound for row in rows), rows


def test_the_loss_need_not_be_returned() -> None:
    step = step_of(mean, returned=False)
    rows = compare(
        jax.tree.leaves(parallelize(step)(PARAMS, BATCH)), jax.tree.leaves(step(PARAMS, BATCH))
    )
    assert all(row.error <= row.bound for row in rows), rows


@pytest.mark.parametrize("value_and_grad", [alpa.value_and_grad, jax.value_and_grad])
def test_a_value_that_differs_between_micro_batches_is_refused(value_and_grad: Any) -> None:
    refused = (
        r"operand \d of this update fragment, a \S+, made by the forward part, differs between "
        r"the 4 micro-batches.*; return it as a result"
    )
    step = step_of(mean, returned=False, value_and_grad=value_and_grad)
    with pytest.raises(PlanningError, match=refused):
        parallelize(step, micro_batches="independent")(PARAMS, BATCH)
