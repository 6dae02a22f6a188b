"""The numbers of stages and layers that `alpa.parallelize` is told."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa
from alpa.runtime.comparison import compare

STATE = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def loss_fn(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def train_step(weights: Any, x: Any) -> Any:
    loss, grads = alpa.value_and_grad(loss_fn)(weights, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def stages(**options: Any) -> list[tuple[str, ...]]:
    """The layers of each stage."""
    step = alpa.parallelize(train_step, cluster="cpu:1x4", **options)
    return [stage.layers for stage in step.prepare(STATE, X).plan.stages]


def test_the_numbers_are_those_of_the_plan() -> None:
    assert stages(num_stages=1, num_layers=3) == [("layer_0", "layer_1", "layer_2")]
    assert stages(num_stages=4) == [("layer_0",), ("layer_1",), ("layer_2",), ("layer_3",)]
    assert [len(layers) for layers in stages(num_stages=2, num_layers=4)] == [2, 2]


def test_a_function_like_the_step_has_its_own_layers() -> None:
    step = alpa.parallelize(train_step, cluster="cpu:1x4", num_stages=2, num_layers=4)
    step.prepare(STATE, X).plan  # noqa: B018 - plans
    norm = alpa.parallelize(lambda weights: weights[0] * 2, like=step)
    assert len(norm.prepare(STATE).plan.stages) == 2  # the meshes of the step


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 0}, ValueError, "num_stages is 0; expected a whole number of at least 1, "),
        ({"num_layers": -1}, ValueError, "num_layers is -1; expected a whole number of at least 1"),
        ({"num_layers": "all"}, ValueError, "num_layers is 'all'; expected a whole number"),
        ({"num_stages": 2.0}, TypeError, "num_stages is 2.0, of type float; expected a whole numb"),
        ({"num_layers": True}, TypeError, "num_layers is True, of type bool; expected a whole num"),
        (
            {"num_stages": 2, "inter": "none"},
            ValueError,
            "inter=none plans one stage, and num_stages is 2; leave one of them out",
        ),
    ],
)
def test_numbers_that_do_not_do(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        alpa.parallelize(train_step, cluster="cpu:1x4", **options)


def test_a_function_like_another_one_has_its_number_of_stages() -> None:
    step = alpa.parallelize(train_step, cluster="cpu:1x4")
    with pytest.raises(ValueError, match=r"settings and workers of train_step; remove num_stages="):
        alpa.parallelize(loss_fn, like=step, num_stages=2)


@pytest.mark.parametrize(
    "schedule", [[["0F0", "0B0"]], [["0F1", "0F0", "0B0", "0B1"]], [["0F0", "0I0", "0W0"]]]
)
def test_a_schedule_of_one_stage(schedule: list[list[str]]) -> None:
    """Its forward and backward part are one fragment."""
    batches = 1 + max(int(word[-1]) for word in schedule[0])
    options: Any = {"schedule": schedule, "num_micro_batches": batches}
    step = alpa.parallelize(train_step, cluster="cpu:1x2", **options)
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (16, 16)) for key in keys[:4]]
    x = jax.random.normal(keys[4], (8, 16))
    found, expected = step(weights, x), jax.jit(train_step)(weights, x)
    assert all(it.ok for it in compare(*map(jax.tree.leaves, (found, expected))))
