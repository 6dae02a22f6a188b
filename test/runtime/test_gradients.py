"""Unmarked gradients that are hard to tell from the rest of the step, against plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa import passes
from alpa.dialects import ir, walk
from alpa.dialects.attributes import GRADIENT, marker_of
from alpa.runtime.planning import PlanningError
from alpa.runtime.reference import compare


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) / 2


WEIGHTS = {"a": _normal(4, 8), "b": _normal(8, 8), "c": _normal(8, 4)}
BATCH = {"x": _normal(16, 4), "y": _normal(16, 4) + 1}


def outputs(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["a"])
    alpa.mark_layer_boundary()
    return jnp.tanh(hidden @ params["b"]) @ params["c"]


def squares(params: Any, batch: Any) -> Any:
    return (outputs(params, batch) - batch["y"]) ** 2


def scaled(params: Any, batch: Any) -> Any:
    """The gradient of the scale is the mean, which belongs to the forward part."""
    return params["scale"] * jnp.mean(squares(params, batch))


def weighted(params: Any, batch: Any) -> Any:
    """Each output's error has a weight whose gradient is that error."""
    return jnp.sum(params["weights"] * jnp.mean(squares(params, batch), axis=0))


def uncertain(params: Any, batch: Any) -> Any:
    """Two tasks, weighted by their uncertainties (Kendall, Gal and Cipolla, 2018, eq. 10)."""
    tasks = jnp.mean(squares(params, batch)), jnp.mean(jnp.abs(outputs(params, batch)))
    return sum(jnp.exp(-params[s]) * task + params[s] for s, task in zip("st", tasks, strict=True))


def constrained(params: Any, batch: Any) -> Any:
    """With a Lagrange multiplier."""
    excess = jnp.mean(outputs(params, batch)) - 0.1
    return jnp.mean(squares(params, batch)) + jax.nn.softplus(params["multiplier"]) * excess


def critic(params: Any, batch: Any) -> Any:
    """Linear in the last layer."""
    return jnp.mean(outputs(params, batch))


def penalised(params: Any, batch: Any) -> Any:
    """With a penalty on the gradient of the outputs with respect to the samples."""
    slopes = jax.grad(lambda x: jnp.sum(outputs(params, {"x": x})))(batch["x"])
    return jnp.mean(squares(params, batch)) + jnp.mean(slopes**2)


def adversarial(params: Any, batch: Any) -> Any:
    """The loss of samples that are moved along their own gradients."""
    slopes = jax.grad(lambda x: jnp.sum(squares(params, {**batch, "x": x})))(batch["x"])
    moved = jax.lax.stop_gradient(batch["x"] + 0.1 * jnp.sign(slopes))
    return jnp.mean(squares(params, {**batch, "x": moved}))


NUMBER = np.float32(0.75)
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaled": (scaled, {"scale": NUMBER}),
    "weighted": (weighted, {"weights": np.array([1, 2, 0.5, 1], np.float32)}),
    "uncertain": (uncertain, {"s": NUMBER, "t": NUMBER}),
    "constrained": (constrained, {"multiplier": NUMBER}),
    "critic": (critic, {}),
    "penalised": (penalised, {}),
    "adversarial": (adversarial, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_adam_takes_the_gradients_of_the_whole_batch(name: str) -> None:
    loss, more = LOSSES[name]
    optimizer = optax.adam(1e-2, eps=1e-3)

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        norms = optax.tree.norm(gradients), optax.tree.norm(gradients["c"])
        return (optax.apply_updates(params, updates), moments), (value, norms)

    params = {**WEIGHTS, **more}
    state = params, optimizer.init(params)
    parallel = alpa.parallelize(
        step,
        cluster="cpu:2x2",
        num_micro_batches=4,
        state_argnums=0,
        batch_argnums=1,
        mesh_shape="1x2",
        inter="equal-layers",
    )
    expected = step(state, BATCH)
    rows = compare(jax.tree.leaves(parallel(state, BATCH)), jax.tree.leaves(expected))
    assert all(row.error <= row.bound for row in rows), rows


def test_the_text_of_a_step_tells_its_gradients() -> None:
    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(scaled)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    params = {**WEIGHTS, "scale": NUMBER}
    parallel = alpa.parallelize(step, cluster="cpu:2x2", num_micro_batches=4)
    assert num_markers(parallel.lower(params, BATCH).compiler_ir()) == 4
    text = jax.jit(step).lower(params, BATCH).as_text(debug_info=True)
    independent = "combine-micro-batches{num-micro-batches=4 micro-batches=independent}"
    assert num_markers(passes.run(text, independent)) == 4


def num_markers(module: ir.Module) -> int:
    """The number of gradients that a program marks."""
    return sum(marker_of(op) == GRADIENT for op in walk(module.body))


@pytest.mark.parametrize("name", LOSSES)
def test_a_text_without_markers_says_what_it_cannot_tell(name: str) -> None:
    loss, more = LOSSES[name]

    def step(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        return params, value, optax.tree.norm(gradients)

    lowered = jax.jit(step, donate_argnums=0).lower({**WEIGHTS, **more}, BATCH)
    for locations in (False, True):
        remarks: list[str] = []
        passes.run(
            lowered.as_text(debug_info=locations),
            "simplify-trivial-ops,layer-cluster{num-layers=2}",
            on_remark=lambda _, text, remarks=remarks: remarks.append(text),
        )
        doubts = [text for text in remarks if "argument 3 may be a factor of the loss" in text]
        is_factor = name in ("scaled", "weighted", "uncertain", "constrained")
        assert len(doubts) == is_factor, remarks


def test_names_are_kept_where_keys_are_folded() -> None:
    """JAX itself jits `where`."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        noise = jax.random.normal(key, batch["y"].shape)
        errors = squares(params, {**batch, "y": batch["y"] + noise})
        return params["scale"] * jnp.mean(jnp.where(errors < 1, errors, jnp.sqrt(errors)))

    def step(params: Any, batch: Any, key: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch, key)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    arguments = {**WEIGHTS, "scale": NUMBER}, BATCH, jax.random.key(0)
    parallel = alpa.parallelize(step, cluster="cpu:2x2", num_micro_batches=4, batch_argnums=1)
    module = passes.run(parallel.lower(*arguments).as_text(), "simplify-trivial-ops")
    assert num_markers(module) == 4


def test_noise_of_the_update_is_drawn_once() -> None:
    def step_of(value_and_grad: Any) -> Any:
        def step(params: Any, batch: Any, key: Any) -> Any:
            value, gradients = value_and_grad(lambda p: jnp.mean(squares(p, batch)))(params)
            noise = 0.01 * jax.random.normal(key, (8, 8))
            params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
            return {**params, "b": params["b"] + noise}, value

        return step

    def parallel(step: Any) -> Any:
        return alpa.parallelize(step, cluster="cpu:2x2", num_micro_batches=4, batch_argnums=1)

    arguments = WEIGHTS, BATCH, jax.random.key(0)
    for value_and_grad in (jax.value_and_grad, alpa.value_and_grad):
        step = step_of(value_and_grad)
        found, expected = parallel(step)(*arguments), step(*arguments)
        rows = compare(jax.tree.leaves(found), jax.tree.leaves(expected))
        assert all(row.error <= row.bound for row in rows), rows


@pytest.mark.parametrize("order", ["both from the old", "one after the other"])
def test_two_losses(order: str) -> None:
    """A generative adversarial step with one loss for each of its two parts."""
    optimizer = optax.adam(1e-2, eps=1e-3)

    def judged(critic: Any, samples: Any) -> Any:
        return jnp.tanh(samples @ critic["a"]) @ critic["b"]

    def of_critic(critic: Any, generator: Any, batch: Any) -> Any:
        real, made = judged(critic, batch["y"]), judged(critic, outputs(generator, batch))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(made))

    def of_generator(generator: Any, critic: Any, batch: Any) -> Any:
        return jnp.mean(jax.nn.softplus(-judged(critic, outputs(generator, batch))))

    def updated(state: Any, gradients: Any) -> Any:
        params, moments = state
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    def step(state: Any, batch: Any) -> Any:
        critic, generator = state
        first, slopes = jax.value_and_grad(of_critic)(critic[0], generator[0], batch)
        new = updated(critic, slopes)
        opponent = critic if order == "both from the old" else new
        second, slopes = jax.value_and_grad(of_generator)(generator[0], opponent[0], batch)
        return (new, updated(generator, slopes)), first, second

    weights = {"a": _normal(4, 8), "b": _normal(8, 1)}
    state = tuple((params, optimizer.init(params)) for params in (weights, WEIGHTS))
    parallel = alpa.parallelize(
        step, cluster="cpu:2x2", num_micro_batches=4, state_argnums=0, batch_argnums=1
    )
    if order == "one after the other":
        # The second loss needs the first update, which needs all micro-batches.
        said = r"multiplies samples by what is made of all samples.* plan with 1 micro-batch"
        with pytest.raises(PlanningError, match=said):
            parallel(state, BATCH)
        return
    expected = step(state, BATCH)
    rows = compare(jax.tree.leaves(parallel(state, BATCH)), jax.tree.leaves(expected))
    assert all(row.error <= row.bound for row in rows), rows
