"""Gradients of 16-bit parameters over 128 micro-batches, against float64 at the whole batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.planning import PlanningError

BATCHES = 128
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
DATA_PARALLEL = {"cluster": "cpu:1x4", "inter": "none", "intra": "data-parallel"}
PIPELINE = {"cluster": "cpu:1x2", "mesh_shape": "1"}


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def arguments(dtype: Any, compute: Any) -> tuple[Any, Any]:
    """State and batch whose numbers are those of a type, in the type to compute in."""
    params = {"a": 0.3 * _normal(0, 8, 16), "b": 0.2 * _normal(1, 16, 8)}
    # These gradients hardly change their sign, so their sum grows and its last bits with it.
    batch = _normal(2, 4 * BATCHES, 8) + 0.5, _normal(3, 4 * BATCHES, 8) + 2

    def rounded(array: np.ndarray) -> jax.Array:
        return jnp.asarray(np.asarray(jnp.asarray(array, dtype), np.float64), compute)

    wide = jnp.promote_types(compute, jnp.float32)
    momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, wide), params)
    return (jax.tree.map(rounded, params), momentum), jax.tree.map(rounded, batch)


def loss_of(params: Any, batch: Any) -> jax.Array:
    x, target = batch
    h = jnp.tanh(x @ params["a"])
    alpa.mark_layer_boundary()
    return jnp.mean((h @ params["b"] - target) ** 2)


def step(state: Any, batch: Any) -> Any:
    """The parameters move by the unconverted gradients, the momentum by f32 ones."""
    params, momentum = state
    loss, grads = alpa.value_and_grad(loss_of)(params, batch)
    momentum = jax.tree.map(lambda m, g: m / 2 + g.astype(m.dtype), momentum, grads)
    return (jax.tree.map(lambda p, g: p - 64 * g, params, grads), momentum), loss


def scaled_step(state: Any, batch: Any) -> Any:
    """The update reads the loss, and the gradients are returned, too."""
    params, momentum = state
    loss, grads = alpa.value_and_grad(loss_of)(params, batch)
    params = jax.tree.map(lambda p, g: p - loss * g, params, grads)
    return (params, momentum), loss, grads


def tied_step(state: Any, batch: Any) -> Any:
    """The last layer, on another mesh, shares its parameter with the first one."""
    params, momentum = state

    def tied(params: Any, batch: Any) -> jax.Array:
        return loss_of({"a": params["a"], "b": params["a"].T}, batch)

    loss, grads = alpa.value_and_grad(tied)(params, batch)
    return ({"a": params["a"] - 64 * grads["a"], "b": params["b"]}, momentum), loss


STEPS = {"step": step, "scaled": scaled_step, "tied": tied_step}


@cache
def reference(name: str, dtype: str) -> Any:
    """The step at the whole batch in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(STEPS[name])(*arguments(dtype, jnp.float64)))


def errors(name: str, dtype: str, options: dict[str, Any], accumulate_dtype: str) -> Any:
    """The norm of each result's error, relative to the result's norm."""
    run = alpa.parallelize(
        STEPS[name], num_micro_batches=BATCHES, accumulate_dtype=accumulate_dtype, **options
    )
    found = run(*arguments(dtype, dtype))
    plan = run.prepare(*arguments(dtype, dtype)).plan
    assert len(plan.meshes) == (1 if options is DATA_PARALLEL else 2)

    def error(found: Any, expected: np.ndarray) -> float:
        difference = np.asarray(found, np.float64) - expected
        return float(np.linalg.norm(difference) / (np.linalg.norm(expected) or 1.0))

    return jax.tree.map(error, found, reference(name, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [DATA_PARALLEL, PIPELINE], ids=["data-parallel", "pipeline"])
def test_many_micro_batches_are_as_exact_as_a_rounding(options: Any, dtype: str) -> None:
    (params, momentum), loss = errors("step", dtype, options, "f32")
    assert max(*params.values(), loss) < ROUNDING[dtype]
    assert max(momentum.values()) < ROUNDING[dtype] / 2
    (narrow_params, narrow_momentum), narrow_loss = errors("step", dtype, options, "same")
    assert narrow_loss > 2 * loss  # The executor accumulates it, because no update reads it.
    assert all(narrow_params[name] > 1.5 * params[name] for name in params)
    assert all(narrow_momentum[name] > 4 * momentum[name] for name in momentum)


def test_losses_that_updates_read_and_returned_gradients_are_added_up_in_f32() -> None:
    (params, _), loss, grads = errors("scaled", "float16", PIPELINE, "f32")
    assert max(loss, *grads.values()) < ROUNDING["float16"]
    assert max(params.values()) < 2 * ROUNDING["float16"]
    (_, _), narrow_loss, narrow = errors("scaled", "float16", PIPELINE, "same")
    assert narrow_loss > 2 * loss
    assert all(narrow[name] > 4 * grads[name] for name in grads)


def test_totals_that_cross_meshes() -> None:
    (params, _), _ = errors("tied", "bfloat16", PIPELINE, "f32")
    (narrow, _), _ = errors("tied", "bfloat16", PIPELINE, "same")
    assert params["a"] < ROUNDING["bfloat16"]
    assert narrow["a"] > 1.5 * params["a"]


def test_more_than_f32() -> None:
    (params, momentum), _ = errors("step", "float16", PIPELINE, "f64")
    assert max(params.values()) < ROUNDING["float16"]
    assert max(momentum.values()) < ROUNDING["float16"] / 2


def test_one_micro_batch_is_as_it_was() -> None:
    def text(accumulate_dtype: str) -> str:
        run = alpa.parallelize(step, accumulate_dtype=accumulate_dtype, **PIPELINE)
        text = str(run.prepare(*arguments("float16", "float16")).plan.module)
        return text.replace('accumulate_dtype = "same", ', "")

    assert text("f32") == text("same")


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="accumulate_dtype is 'f16'; expected one of f32, f64, s"):
        alpa.parallelize(step, cluster="cpu:1x1", accumulate_dtype="f16")


def test_an_error_for_sums_that_do_not_fit_says_what_to_do(small_cluster: Any) -> None:
    def train(w: jax.Array, x: jax.Array) -> Any:
        loss, grad = alpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grad, loss

    given = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((8, 256), jnp.bfloat16)
    options = {"cluster": str(small_cluster("450KiB", devices=1)), "num_micro_batches": 4}
    said = (
        "fits into memory.* Adding up gradients in f32 takes 128 KiB more in all than in their own "
        "types, which accumulate-dtype=same keeps"
    )
    with pytest.raises(PlanningError, match=said):
        alpa.parallelize(train, **options)(*given)
    new, _ = alpa.parallelize(train, accumulate_dtype="same", **options)(*given)
    assert new.shape == (256, 256)
