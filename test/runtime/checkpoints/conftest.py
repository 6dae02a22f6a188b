"""A training program that plans and compiles quickly, with a random key in its state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import WorkerOptions


class Training:
    """Two layers of a perceptron with dropout, under gradient descent with momentum."""

    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)

    def init(self) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(3))
        params = [{"w": 0.3 * jax.random.normal(key, (16, 16))} for key in keys]
        velocity = jax.tree.map(jnp.zeros_like, params)
        return {"params": params, "velocity": velocity, "count": 0, "key": jax.random.key(7)}

    def train_step(self, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            x = batch["x"] * jax.random.bernoulli(state["key"], 0.9, (1, 16))
            x = jnp.tanh(x @ params[0]["w"])
            alpa.mark_layer_boundary()
            return jnp.mean((x @ params[1]["w"] - batch["y"]) ** 2)

        loss, grads = alpa.value_and_grad(loss_fn)(state["params"])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], velocity)
        key, _ = jax.random.split(state["key"])
        count = state["count"] + 1
        return {"params": params, "velocity": velocity, "count": count, "key": key}, loss

    def parallelize(
        self,
        executor: str = "local",
        cluster: str = "cpu:2x2",
        mesh_shape: str = "1x2",
        **options: Any,
    ) -> Any:
        """Two meshes of two devices, unless the caller names another cluster."""
        return alpa.parallelize(
            self.train_step,
            cluster=cluster,
            mesh_shape=mesh_shape,
            inter="equal-layers",
            donate_argnums=0,
            executor=executor,
            workers=self.workers if executor == "ray" else None,
            **options,
        )

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        draw: Callable[[], Any] = partial(np.random.default_rng(step).normal, size=(8, 16))
        return {"x": draw().astype(np.float32), "y": draw().astype(np.float32)}

    def run(self, step: Any, state: Any, steps: range) -> tuple[Any, list[float]]:
        """The state and the losses of steps."""
        losses: list[float] = []
        for number in steps:
            state, loss = step(state, self.batch(number))
            losses.append(float(loss))
        return state, losses


@pytest.fixture
def training() -> Training:
    return Training()
