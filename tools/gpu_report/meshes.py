"""Two meshes that share one GPU: results, transfers and checkpoints on Ray."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.workers.executor import RayExecutable
from alpa.runtime.workers.options import Platform, Transport
from alpa.tools import zoo

_BATCH, _MICRO_BATCHES, _STEPS = 16, 4, 3
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
    transfer: float
    """that the busier mesh spends on transfers in a traced step"""


def try_meshes(transports: Sequence[Transport], platform: Platform) -> list[MeshesReport]:
    """Trains gpt-tiny on two meshes of one device each, in two processes.

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
        return [_try(transport, platform) for transport in transports]
    finally:
        ray.shutdown()


def _try(transport: Transport, platform: Platform) -> MeshesReport:
    program = zoo.get("gpt-tiny")
    train_step = alpa.parallelize(
        program.train_step,
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
        with executable.trace() as trace:
            state, loss = train_step(state, batch)
        with tempfile.TemporaryDirectory() as folder:
            alpa.save(Path(folder), _STEPS, state)
            saved = _arrays(state)
            again = alpa.restore(Path(folder), program.init_state, train_step, batch)
            is_same = all(map(np.array_equal, saved, _arrays(again)))
            _, loss = train_step(state, batch)
            _, loss_again = train_step(again, batch)
        return MeshesReport(
            transport=transport,
            way=executable.transport,
            comparison=compared.summary(),
            is_equal=not compared.is_fault and len(executable.program.meshes) == 2,
            is_restored=is_same and float(loss) == float(loss_again),
            step=min(seconds),
            transfer=max(split.transfer for split in trace.splits().values()),
        )


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
