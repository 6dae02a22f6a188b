"""Run by `test_elastic.py`: trains on a Ray cluster of its own, of three nodes.

One of them is lost, and a new one comes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ray.cluster_utils import Cluster

import alpa
from alpa.runtime import WorkerError, WorkerOptions
from alpa.runtime.workers.cluster import living_nodes

LAYERS = 6
STEPS = 3  # between two losses of a node


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [0.5 * jax.random.normal(key, (16, 16)) for key in keys]
    return {"weights": weights, "velocity": jax.tree.map(jnp.zeros_like, weights), "count": 0}


def train_step(state: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        h = x
        for layer in weights:
            h = jnp.tanh(h @ layer)
            alpa.mark_layer_boundary()
        return jnp.mean((h - x) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(state["weights"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    weights = jax.tree.map(lambda w, v: w - 0.1 * v, state["weights"], velocity)
    return {"weights": weights, "velocity": velocity, "count": state["count"] + 1}, loss


def batch(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(24, 16)).astype(np.float32)


class Run:
    """A training that saves each step, its losses by step, and what its plans were made for."""

    def __init__(self, step: Any, directory: Path) -> None:
        self._step, self._directory = step, directory
        self.losses: dict[int, float] = {}
        self.clusters: list[str] = []
        self.devices: list[int] = []

    def train(self) -> None:
        """Trains some steps more."""
        number, state = alpa.resume(self._directory, init, self._step, batch(0))
        # What was not saved is repeated.
        assert len(self.losses) - 1 <= number <= len(self.losses)
        self.clusters.append(self._step.target.settings.cluster)
        plan = self._step.prepare(state, batch(0)).plan
        self.devices.append(sum(len(mesh.devices) for mesh in plan.meshes))
        for _ in range(STEPS):
            state, loss = self._step(state, batch(number))
            self.losses[number] = float(loss)
            number += 1
            alpa.save(self._directory, number, state)


def main(directory: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("alpa").addHandler(handler)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=2, num_gpus=0) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address)
        # Not that of this process.
        lost = next(it for it in nodes if it.node_id != ray.get_runtime_context().get_node_id())
        step = alpa.parallelize(
            train_step,
            cluster="cpu:3x2",
            num_micro_batches=2,
            inter="equal-layers",
            mesh_shape="1x2",
            executor="ray",
            workers=WorkerOptions(cache_directory=None, timeout_seconds=120),
            elastic=True,
        )
        run = Run(step, directory)
        run.train()
        cluster.remove_node(lost, allow_graceful=False)
        with suppress(WorkerError):  # Workers outlive their node for a moment.
            run.train()
        while len(living_nodes()) > 2:
            time.sleep(0.1)
        run.train()
        cluster.add_node(num_cpus=2, num_gpus=0)
        cluster.wait_for_nodes()
        run.train()
        state, expected = init(), list[float]()
        plain = jax.jit(train_step)
        for number in range(len(run.losses)):
            state, loss = plain(state, batch(number))
            expected.append(float(loss))
        found = {
            "losses": [run.losses[n] for n in range(len(run.losses))],
            "expected": expected,
            "clusters": run.clusters,
            "devices": run.devices,
            "said": said,
        }
        sys.stdout.write(f"{json.dumps(found)}\n")
        del step, run
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
