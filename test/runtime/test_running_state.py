"""Running averages and counters that the loss reads.

The forward part writes them, and the next micro-batch reads the written values. They look like
parameters, and are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
import alpa.passes
from alpa.dialects import body, main_function
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step
from alpa.runtime.reference import compare

MICRO_BATCHES = 4
Loss = Callable[[Any, Any, Any], Any]
stop = jax.lax.stop_gradient


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) / 2


def head(p: Any, h: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(h @ p["b"]) @ p["c"] - batch["y"]) ** 2)


def new_mean(p: Any, s: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ p["a"])
    mean = 0.9 * s["mean"] + 0.1 * stop(h).mean(0)
    return head(p, h - mean, batch), {"mean": mean}


def old_mean(p: Any, s: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ p["a"])
    mean = 0.9 * s["mean"] + 0.1 * stop(h).mean(0)
    return head(p, h - s["mean"], batch), {"mean": mean}


def mean_and_variance(p: Any, s: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ p["a"])
    mean = 0.9 * s["mean"] + 0.1 * stop(h).mean(0)
    variance = 0.9 * s["variance"] + 0.1 * ((stop(h) - mean) ** 2).mean(0)
    y = (h - mean) * jax.lax.rsqrt(variance + 0.1)
    return head(p, y, batch), {"mean": mean, "variance": variance}


def counter(p: Any, s: Any, batch: Any) -> Any:
    count = s["count"] + (batch["x"] > 0).sum(dtype=s["count"].dtype)
    h = jnp.tanh(batch["x"] @ p["a"]) * (1 + 1 / count.astype(jnp.float32))
    return head(p, h, batch), {"count": count}


def baseline(p: Any, s: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ p["a"])
    reward = stop(h.mean())
    kept = 0.9 * s["baseline"] + 0.1 * reward
    return head(p, h, batch) * (1 + reward - kept), {"baseline": kept}


def old_mean_at_the_end(p: Any, s: Any, batch: Any) -> Any:
    y = jnp.tanh(batch["x"] @ p["a"]) @ p["c"]
    mean = 0.9 * s["mean"] + 0.1 * stop(y).mean(0)
    return jnp.mean((y - s["mean"] - batch["y"]) ** 2), {"mean": mean}


def new_mean_at_the_end(p: Any, s: Any, batch: Any) -> Any:
    y = jnp.tanh(batch["x"] @ p["a"]) @ p["c"]
    mean = 0.9 * s["mean"] + 0.1 * stop(y).mean(0)
    return jnp.mean((y - mean - batch["y"]) ** 2), {"mean": mean}


def average_of_the_loss(p: Any, s: Any, batch: Any) -> Any:
    loss = head(p, jnp.tanh(batch["x"] @ p["a"]), batch)
    average = 0.9 * s["average"] + 0.1 * stop(loss)
    return loss / average, {"average": average}


def average_without_bias(p: Any, s: Any, batch: Any) -> Any:
    """As Haiku's batch norm: the average is divided by what the counter says that it lacks."""
    h = jnp.tanh(batch["x"] @ p["a"])
    count = s["count"] + 1
    hidden = 0.9 * s["hidden"] + 0.1 * stop(h).mean(0)
    average = hidden / (1 - 0.9**count)
    return head(p, h - h.mean(0), batch), {"hidden": hidden, "average": average, "count": count}


WRITTEN: dict[str, tuple[Loss, dict[str, Any]]] = {
    "new mean": (new_mean, {"mean": _normal(8)}),
    "old mean": (old_mean, {"mean": _normal(8)}),
    "mean and variance": (
        mean_and_variance,
        {"mean": _normal(8), "variance": np.ones(8, np.float32)},
    ),
    "count of floats": (counter, {"count": np.float32(3)}),
    "count": (counter, {"count": np.int32(3)}),
    "old mean at the end": (old_mean_at_the_end, {"mean": _normal(4)}),
    "new mean at the end": (new_mean_at_the_end, {"mean": _normal(4)}),
    "average of the loss": (average_of_the_loss, {"average": np.float32(0.5)}),
    "average without bias": (
        average_without_bias,
        {"hidden": _normal(8), "average": _normal(8), "count": np.int32(2)},
    ),
    "baseline": (baseline, {"baseline": np.float32(0.5)}),
}


def step_of(loss: Loss, *, marked: bool) -> tuple[Any, Any]:
    """A step of gradient descent, and the same step in plain JAX, micro-batch by micro-batch."""
    value_and_grad = alpa.value_and_grad if marked else jax.value_and_grad

    def gradients(state: Any, batch: Any) -> Any:
        both = value_and_grad(loss, has_aux=True)
        (value, kept), grads = both(state["params"], state["kept"], batch)
        return value, kept, grads

    def update(state: Any, kept: Any, grads: Any) -> Any:
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)
        return {"params": params, "kept": kept}

    def step(state: Any, batch: Any) -> Any:
        value, kept, grads = gradients(state, batch)
        return update(state, kept, grads), value

    def looped(state: Any, batch: Any) -> Any:
        kept, values, each = state["kept"], [], []
        for m in range(MICRO_BATCHES):
            part = jax.tree.map(lambda a, m=m: np.split(a, MICRO_BATCHES)[m], batch)
            value, kept, grads = gradients({**state, "kept": kept}, part)
            values.append(value)
            each.append(grads)
        grads = jax.tree.map(lambda *g: sum(g) / MICRO_BATCHES, *each)
        return update(state, kept, grads), sum(values) / MICRO_BATCHES

    return step, looped


PARAMS = {"a": _normal(4, 8), "b": _normal(8, 8), "c": _normal(8, 4)}
BATCH = {"x": _normal(16, 4), "y": _normal(16, 4) + 1}


def independent(step: Any, cluster: str, micro_batches: int) -> Any:
    """A step of a state and a batch whose micro-batches are batches of their own."""
    return alpa.parallelize(
        step,
        cluster=cluster,
        num_micro_batches=micro_batches,
        micro_batches="independent",
        state_argnums=0,
        batch_argnums=1,
    )


@pytest.mark.parametrize("marked", [False, True], ids=["found", "marked"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_forward_part_writes_goes_from_micro_batch_to_micro_batch(
    name: str, marked: bool
) -> None:
    loss, kept = WRITTEN[name]
    step, looped = step_of(loss, marked=marked)
    parallelized = independent(step, "cpu:1x2", MICRO_BATCHES)
    state = {"params": PARAMS, "kept": kept}
    found, expected = parallelized(state, BATCH), looped(state, BATCH)
    rows = compare(jax.tree.leaves(found), jax.tree.leaves(expected))
    assert all(row.error <= row.bound for row in rows), rows


def parts_of_new_states(loss: Loss, params: Any, kept: Any) -> dict[str, str | None]:
    """For each state the part that computes its new value."""
    step, _ = step_of(loss, marked=False)
    parallelized = independent(step, "cpu:1x1", 2)
    state = {"params": params, "kept": kept}
    module = alpa.passes.run(parallelized.lower(state, BATCH).compiler_ir(), "simplify-trivial-ops")
    function = main_function(module)
    graph = Graph.of(body(function))
    parts = split_step(graph, infer_roles(function, graph))
    names = [jax.tree_util.keystr(path[-1:]) for path, _ in jax.tree.leaves_with_path(state)]
    return {
        name.strip("[]'"): parts.part[graph.producer[v]]
        for name, v in zip(names, graph.returned, strict=False)
    }


def test_a_linear_last_layer_whose_gradient_is_a_mean_is_a_parameter() -> None:
    """The gradient of `c` does not depend on `c`, like the change of a running mean."""

    def critic(p: Any, s: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ p["a"]) @ p["b"]) @ p["c"]), s

    assert set(parts_of_new_states(critic, PARAMS, {}).values()) == {"update"}


def test_a_baseline_that_the_loss_is_linear_in_is_no_parameter() -> None:
    def reinforced(p: Any, s: Any, batch: Any) -> Any:
        log_probability = jax.nn.log_softmax(jnp.tanh(batch["x"] @ p["a"]) @ p["b"])[:, 0]
        reward = batch["y"].sum(-1)
        kept = 0.9 * s["baseline"] + 0.1 * reward.mean()
        return -jnp.mean(log_probability * (reward - s["baseline"])), {"baseline": kept}

    params = {"a": PARAMS["a"], "b": PARAMS["b"]}
    parts = parts_of_new_states(reinforced, params, {"baseline": np.float32(1)})
    assert parts == {"baseline": "forward", "a": "update", "b": "update"}


def test_actor_and_critic_are_parameters_though_one_gradient_stops_between_them() -> None:
    """The actor's gradient depends on the critic, and the critic's on no actor."""

    def both(p: Any, s: Any, batch: Any) -> Any:
        value = jnp.tanh(batch["x"] @ p["a"]) @ p["b"][:, 0]
        advantage = stop(batch["y"].sum(-1) - value)
        log_probability = jax.nn.log_softmax(batch["x"] @ p["actor"])[:, 0]
        actor = -jnp.mean(log_probability * advantage)
        return actor + jnp.mean((value - batch["y"].sum(-1)) ** 2), s

    params = {**PARAMS, "actor": _normal(4, 3)}
    del params["c"]
    assert set(parts_of_new_states(both, params, {}).values()) == {"update"}


def test_a_probe_of_activations_makes_no_running_state_of_the_layers_before_it() -> None:
    def probed(p: Any, s: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ p["a"])
        probe = jnp.mean((jnp.tanh(stop(h) @ p["probe"]) - batch["y"]) ** 2)
        return head(p, h, batch) + probe, s

    params = {**PARAMS, "probe": _normal(8, 4)}
    assert set(parts_of_new_states(probed, params, {}).values()) == {"update"}


def test_a_running_mean_is_of_the_forward_part_and_parameters_of_the_update() -> None:
    parts = parts_of_new_states(old_mean, PARAMS, {"mean": _normal(8)})
    assert parts == {"mean": "forward", "a": "update", "b": "update", "c": "update"}


def test_a_counter_that_the_update_reads_advances_once_per_step() -> None:
    """The step count of an optimizer, from which the forward part takes a rate."""

    def step(state: Any, batch: Any) -> Any:
        count = state["count"] + 1

        def loss_fn(params: Any) -> Any:
            loss, kept = average_without_bias(params, {**state, "count": count - 1}, batch)
            return loss, kept

        (loss, kept), grads = alpa.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda w, g: w - g / (9 + count), state["params"], grads)
        return {"params": params, **kept, "count": count}, loss

    parallelized = independent(step, "cpu:1x1", 2)
    kept = {"hidden": _normal(8), "average": _normal(8), "count": np.int32(2)}
    state, _ = parallelized({"params": PARAMS, **kept}, BATCH)
    assert int(state["count"]) == 3
