"""Run by `test_gpus.py`: a Ray cluster that believes to have four GPUs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import alpa
from alpa.runtime import WorkerError, WorkerOptions
from alpa.runtime.workers.cluster import Post, actor_resources, reserve
from alpa.runtime.workers.errors import ClusterSizeError
from alpa.runtime.workers.gpus import gpus_of
from alpa.runtime.workers.group import WorkerGroup, worker_environment


class Reporter:
    """An actor in place of a worker."""

    def report(self) -> dict[str, Any]:
        names = ("CUDA_VISIBLE_DEVICES", "XLA_CLIENT_MEM_FRACTION", "JAX_PLATFORMS")
        environment = {name: os.environ.get(name) for name in names}
        return {"gpus": ray.get_runtime_context().get_accelerator_ids()["GPU"], **environment}


def posts(*meshes: tuple[int, ...]) -> list[Post]:
    """A mesh on one host for each of these groups of devices."""
    return [
        Post(
            rank=rank,
            mesh=f"mesh_{rank}",
            host=0,
            devices=devices,
            process=0,
            processes=1,
            core=0,
        )
        for rank, devices in enumerate(meshes)
    ]


def reports(posts: Sequence[Post], options: WorkerOptions) -> list[dict[str, Any]]:
    """What actors with a group's resources find; `own` is what they would use."""
    placement, bundles = reserve(posts, "gpu", options)
    remote: Any = ray.remote(Reporter)
    actors = [
        remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=bundles[post.host]
            ),
            runtime_env={"env_vars": worker_environment(post, "gpu", options)},
            **actor_resources(post, "gpu", options),
        ).remote()
        for post in posts
    ]
    found = ray.get([actor.report.remote() for actor in actors])
    owned = gpus_of(posts, [it["gpus"] for it in found])
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(placement)
    return [{**it, "own": own} for it, own in zip(found, owned, strict=True)]


def error_of(posts: Sequence[Post], options: WorkerOptions) -> str:
    """Why a group cannot start."""
    try:
        WorkerGroup(posts, options)
    except (ClusterSizeError, WorkerError, ValueError) as error:
        return str(error)
    return ""


def train_step(weights: list[Any], x: Any) -> Any:
    def loss_fn(weights: list[Any]) -> Any:
        h = jnp.tanh(x @ weights[0])
        alpa.mark_layer_boundary()
        return jnp.mean((h @ weights[1] * jnp.array([1.0, 2.0])) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def error_of_training() -> str:
    """Why a step cannot run, whose arguments have not started JAX here."""
    step = alpa.parallelize(
        train_step,
        cluster="cpu:1x2",
        inter="equal-layers",
        mesh_shape="1x1",
        executor="ray",
        workers=WorkerOptions(timeout_seconds=300),
    )
    try:
        step([np.eye(2, dtype=np.float32)] * 2, np.ones((4, 2), np.float32))
    except (WorkerError, ValueError) as error:
        return str(error)
    return ""


def main() -> None:
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False)
    options = WorkerOptions(timeout_seconds=300)
    assert jax.config.jax_platforms is None
    three = posts((0,), (2, 3), (1,))
    found = {
        "whole": reports(three, options),
        "shared": reports(posts((0,), (1,)), WorkerOptions(gpu_share=0.5)),
        "no GPUs": error_of_training(),
        "caller": jax.config.jax_platforms,
        "too many": error_of(posts((0, 1, 2), (3, 4)), options),
    }
    ray.shutdown()
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
