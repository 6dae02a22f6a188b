"""Run by `test_nodes.py`: trains on a Ray cluster of its own.

The second node joins later, is lost, and is replaced by another one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

import alpa
from alpa.runtime import WorkerError, WorkerOptions
from alpa.runtime.workers.errors import ClusterSizeError


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        h = jnp.tanh(x @ weights[0])
        alpa.mark_layer_boundary()
        return jnp.mean((h @ weights[1]) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    try:
        ray.init(address=cluster.address)
        step = alpa.parallelize(
            train_step,
            cluster="cpu:2x2",
            num_micro_batches=2,
            inter="equal-layers",
            mesh_shape="1x2",
            executor="ray",
            workers=WorkerOptions(cache_directory=None, timeout_seconds=120),
        )
        weights = [np.eye(8, dtype=np.float32)] * 2
        x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        try:
            step(weights, x)
            refused = ""
        except ClusterSizeError as error:
            refused = str(error)
        second = cluster.add_node(num_cpus=2, num_gpus=0)
        cluster.wait_for_nodes()
        _, loss = step(weights, x)
        _, expected = jax.jit(train_step)(weights, x)
        groups = placement_group_table().values()
        nodes = {
            node
            for group in groups
            if group["state"] == "CREATED"
            for node in group["bundles_to_node_id"].values()
        }
        found: dict[str, Any] = {
            "refused": refused,
            "nodes": len(nodes),
            "loss": float(loss),
            "expected": float(expected),
        }
        cluster.remove_node(second, allow_graceful=False)
        while "lost" not in found:  # Workers outlive their node for a moment.
            try:
                step(weights, x)[1].block_until_ready()
            except WorkerError as error:
                found["lost"] = str(error)
        cluster.add_node(num_cpus=2, num_gpus=0)
        cluster.wait_for_nodes()
        found["loss_again"] = float(step(weights, x)[1])
        sys.stdout.write(f"{json.dumps(found)}\n")
        del step, loss
        ray.shutdown()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
