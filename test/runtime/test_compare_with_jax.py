"""`alpa.compare_with_jax`: equal steps, faults that it has to find, and noise that is no fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime.compare_with_jax import check_memory, compare_with_jax
from alpa.runtime.comparison import Comparison

parallelize = partial(alpa.parallelize, cluster="cpu:1x2", batch_argnums=1, state_argnums=0)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def loss(params: Any, batch: Any, key: Any = None) -> Any:
    x = jnp.tanh(batch["x"] @ params["first"])
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)
    return jnp.mean((x @ params["second"] - batch["y"]) ** 2)


def step(state: Any, batch: Any) -> Any:
    value, gradients = alpa.value_and_grad(loss)(state[0], batch)
    updates, opt = OPTIMIZER.update(gradients, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt), value


def dropout_step(state: Any, batch: Any, key: Any) -> Any:
    value, gradients = alpa.value_and_grad(loss)(state[0], batch, key)
    updates, opt = OPTIMIZER.update(gradients, state[1], state[0])
    return (optax.apply_updates(state[0], updates), opt), value


def state_and_batch() -> tuple[Any, Any]:
    r = np.random.default_rng(0)
    shapes = {"first": (16, 32), "second": (32, 4)}
    params = {name: (0.2 * r.normal(size=s)).astype(np.float32) for name, s in shapes.items()}
    batch = {n: r.normal(size=(8, d)).astype(np.float32) for n, d in (("x", 16), ("y", 4))}
    return (params, jax.tree.map(np.asarray, OPTIMIZER.init(params))), batch


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def verdicts(report: Comparison) -> dict[str, str]:
    return {tensor.label: tensor.verdict for tensor in report.tensors}


@pytest.mark.parametrize("number", [1, 2])
def test_step_is_equal_and_keeps_its_arguments(number: int) -> None:
    state, batch = jax.tree.map(jnp.asarray, state_and_batch())
    train_step = parallelize(step, num_micro_batches=number, donate_argnums=0)
    report = alpa.compare_with_jax(train_step, state, batch)
    assert {*verdicts(report).values()} == {"equal"}
    assert "result[0][0]['first']" in verdicts(report)
    assert report.reference == "plain JAX on one device"
    assert not report.is_fault
    assert not any(array.is_deleted() for array in jax.tree.leaves(state))
    assert all(tensor.noise > 0 for tensor in report.tensors)


def test_arrays_are_drawn_for_shapes() -> None:
    report = compare_with_jax(parallelize(step), *shapes_of(state_and_batch()))
    assert {*verdicts(report).values()} == {"equal"}


def test_numbers_whose_distribution_depends_on_the_samples() -> None:
    """Each micro-batch draws with its own samples' parameters."""

    def mixed(w: Any, x: Any, key: Any) -> Any:
        shares = jax.random.beta(key, 0.4, jnp.abs(x[:, :1]) + 1, (x.shape[0], 1))
        value, g = alpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(shares * x @ w) ** 2))(w)
        return w - 0.1 * g, value, shares

    r = np.random.default_rng(0)
    w, x = (r.normal(size=shape).astype(np.float32) for shape in ((6, 3), (8, 6)))
    report = compare_with_jax(parallelize(mixed, num_micro_batches=2), w, x, jax.random.key(3))
    assert report.reference == "plain JAX, with numbers drawn by 2 micro-batches"
    assert {*verdicts(report).values()} == {"equal"}


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3)])
def test_keys_are_folded_in_the_reference_too(key: Any) -> None:
    train_step = parallelize(dropout_step, num_micro_batches=2)
    report = compare_with_jax(train_step, *state_and_batch(), key)
    assert report.reference == "plain JAX, with numbers drawn by 2 micro-batches"
    assert {*verdicts(report).values()} == {"equal"}
    whole = compare_with_jax(train_step, *state_and_batch(), key, reference="whole-batch")
    assert whole.is_fault


def test_numbers_of_one_micro_batch_are_those_of_plain_jax() -> None:
    report = compare_with_jax(parallelize(dropout_step), *state_and_batch(), jax.random.key(3))
    assert report.reference == "plain JAX on one device"
    assert {*verdicts(report).values()} == {"equal"}


def test_plan_with_a_planted_fault_differs(tmp_path: Path) -> None:
    """A plan whose learning rate is a hundredth too large moves parameters by little."""
    state, batch = state_and_batch()
    path = tmp_path / "planned.mlir"
    parallelize(step).plan(state, batch).save(path)
    text = path.read_text()
    rate = "dense<-1.000000e-01>"
    assert rate in text
    path.write_text(text.replace(rate, "dense<-1.010000e-01>"))
    report = compare_with_jax(parallelize(step, plan=path), state, batch)
    found = verdicts(report)
    assert {label for label, verdict in found.items() if verdict == "differs"} == {
        "result[0][0]['first']",
        "result[0][0]['second']",
    }
    assert "FAULT: 2 differ" in str(report)


def test_reference_may_be_another_function() -> None:
    def longer(state: Any, batch: Any) -> Any:
        new, value = step(state, batch)
        return new, value * 1.001

    report = compare_with_jax(parallelize(step), *state_and_batch(), reference=longer)
    assert verdicts(report)["result[1]"] == "differs"
    assert report.reference == "longer, in plain JAX"


def test_cancellation_is_noise() -> None:
    """Sums that nearly cancel, over dimensions that the plan splits."""

    def normalized(w: Any, x: Any) -> Any:
        y = x @ w
        y = (y - y.mean(1, keepdims=True)) / y.std(1, keepdims=True)
        return y, x.sum(1)

    r = np.random.default_rng(0)
    w = np.ones((512, 4), np.float32) * (1 + 1e-6 * r.normal(size=(1, 4))).astype(np.float32)
    x = r.uniform(1, 2, (16, 512)).astype(np.float32)
    train_step = alpa.parallelize(normalized, cluster="cpu:1x4", batch_argnums=1, mesh_shape="1x4")
    report = compare_with_jax(train_step, w, x, reference=reordered(normalized))
    assert verdicts(report) == {"result[0]": "noise", "result[1]": "equal"}
    assert report.is_noise
    assert "warning: 1 differ" in str(report)


def reordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same mathematics as for reversed sums."""
    return lambda w, x: function(w[::-1], x[:, ::-1])


def test_smaller_program_is_compared_on_request() -> None:
    train_step = parallelize(step, num_micro_batches=2)
    report = compare_with_jax(train_step, *state_and_batch(), shrink={32: 8})
    assert {*verdicts(report).values()} == {"equal"}
    types = {tensor.label: tensor.type for tensor in report.tensors}
    assert types["result[0][0]['first']"] == "tensor<16x8xf32>"
    with pytest.raises(ValueError, match="no dimension has size 33"):
        compare_with_jax(train_step, *state_and_batch(), shrink={33: 8})


def test_sums_are_not_shrunk() -> None:
    train_step = parallelize(step, num_micro_batches=2, loss_reduction="sum")
    with pytest.raises(ValueError, match="compare it with num_micro_batches=1"):
        compare_with_jax(train_step, *state_and_batch(), shrink={32: 8})


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a function that alpa\.parallelize returned"):
        compare_with_jax(step, *state_and_batch())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected whole-batch"):
        compare_with_jax(parallelize(step), *state_and_batch(), reference="jax")  # type: ignore[arg-type]
    message = r"huge has 1024.0 GiB of arguments, up to 7168 GiB on 4 virtual devices .* shrink="
    with pytest.raises(ValueError, match=message):
        check_memory(2**40, 4, "huge")
