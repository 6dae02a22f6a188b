"""Two meshes that share one GPU: results, transfers and checkpoints on Ray."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.workers.executor import RayExecutable
from alpa.runtime.workers.options import Platform, Transport
from alpa.tools import zoo

_BATCH, _MICRO_BATCHES, _STEPS = 16, 4, 3
_WIDTH, _NARROW = 4096, 8
"""Columns of a large tile, and of the arguments that it is made of."""
_CPUS = 4
"""Of the Ray cluster: two workers, and room."""


@dataclass(frozen=True, kw_only=True)
class MeshesReport:
    """What two meshes did with one transport; seconds are of the fastest of some steps."""

    transport: Transport
    way: str
    """of tiles, and the reason"""
    comparison: str
    """results of a step beside plain JAX, in words"""
    is_equal: bool
    is_restored: bool
    """whether a restored state is the saved one bit by bit, and continues with the same loss"""
    step: float
    rate: float
    """bytes per second of large tiles"""


def try_meshes(
    transports: Sequence[Transport], platform: Platform, tile_bytes: int
) -> list[MeshesReport]:
    """Trains gpt-tiny on two meshes of one device each, in two processes; then a program that does
    little but send tiles of so many bytes.

    Products are computed in full f32: by default GPUs round their operands to TF32, and plain JAX,
    the reference, runs in this process on the CPU.

    Raises:
        RuntimeError: a worker fails.
        ValueError: Ray has too few devices.
    """
    jax.config.update("jax_default_matmul_precision", "highest")
    ray.init(
        address="local",
        num_cpus=max(_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
    )
    try:
        return [_try(transport, platform, tile_bytes) for transport in transports]
    finally:
        ray.shutdown()


def _on_two_meshes(
    function: Callable[..., Any], transport: Transport, platform: Platform
) -> Parallelized[..., Any]:
    """A step whose two meshes have one device each."""
    return alpa.parallelize(
        function,
        cluster="cpu:1x2",  # The smallest of all presets: it decides the plan, not where it runs.
        num_micro_batches=_MICRO_BATCHES,
        inter="equal-layers",
        mesh_shape="1x1",
        donate_argnums=0,
        executor="ray",
        workers=WorkerOptions(
            platform=platform,
            transport=transport,
            gpu_share=0.5 if platform == "gpu" else 1.0,
            cache_directory=None,
        ),
    )


def _try(transport: Transport, platform: Platform, tile_bytes: int) -> MeshesReport:
    program = zoo.get("gpt-tiny")
    train_step = _on_two_meshes(program.train_step, transport, platform)
    batch = program.random_batch(1, _BATCH)
    executable = train_step.executable(program.init_state(), batch)
    assert isinstance(executable, RayExecutable)
    with executable:
        compared = alpa.compare_with_jax(train_step, program.init_state(), batch)
        state, seconds = alpa.create_state(program.init_state, train_step, batch), []
        for _ in range(_STEPS):
            begin = time.perf_counter()
            state, loss = train_step(state, batch)
            jax.block_until_ready(loss)
            seconds.append(time.perf_counter() - begin)
        with tempfile.TemporaryDirectory() as folder:
            alpa.save(Path(folder), _STEPS, state)
            saved = _arrays(state)
            again = alpa.restore(Path(folder), program.init_state, train_step, batch)
            is_restored = all(map(np.array_equal, saved, _arrays(again)))
            _, loss = train_step(state, batch)
            _, loss_again = train_step(again, batch)
            is_restored &= float(loss) == float(loss_again)
        way, meshes = executable.transport, len(executable.program.meshes)
    return MeshesReport(
        transport=transport,
        way=way,
        comparison=compared.summary(),
        is_equal=not compared.is_fault and meshes == 2,
        is_restored=is_restored,
        step=min(seconds),
        rate=_rate(transport, platform, tile_bytes),
    )


def _rate(transport: Transport, platform: Platform, tile_bytes: int) -> float:
    """Bytes per second of tiles of so many bytes, which go to and fro between two meshes."""
    rows = tile_bytes // 4 // _WIDTH
    weights = [np.ones(shape, np.float32) for shape in ((_NARROW, _WIDTH), (_WIDTH, _NARROW))]
    x = np.ones((_MICRO_BATCHES * rows, _NARROW), np.float32)
    train_step = _on_two_meshes(_wide_step, transport, platform)
    executable = train_step.executable(weights, x)
    assert isinstance(executable, RayExecutable)
    with executable:
        for _ in range(2):  # The first step connects the workers.
            weights, _ = train_step(weights, x)
        with executable.trace() as trace:
            train_step(weights, x)
    longest = max(split.transfer for split in trace.splits().values())
    return 2 * 4 * len(x) * _WIDTH / longest


def _wide_step(weights: list[Any], x: Any) -> tuple[list[Any], Any]:
    """A step with large values between its two layers, made of small arguments."""

    def loss_fn(weights: list[Any]) -> Any:
        hidden = jnp.tanh(x @ weights[0])
        alpa.mark_layer_boundary()
        return jnp.mean((hidden @ weights[1]) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
