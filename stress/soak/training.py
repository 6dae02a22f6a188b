"""The training under observation: a zoo model on meshes, with everything that a long run does.

Batches are placed ahead of their steps, and the loss of each step is read while the next one runs.
Checkpoints are saved regularly in the background and old ones deleted, and the same meshes evaluate
the state.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import ray

import alpa
from alpa.passes.cost.cluster import Cluster
from alpa.runtime import Executable, WorkerOptions, prefetch
from alpa.runtime.parallelized import Parallelized
from alpa.tools import zoo
from alpa.tools.devices import make_devices
from alpa.tools.zoo import TrainingProgram, TrainState


class SoakError(Exception):
    """The run cannot continue; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A program with its plan, and how often it saves and evaluates.

    `keep` checkpoints are kept. `batch_size` is the number of samples per step.
    """

    program: TrainingProgram
    batch_size: int
    executor: Literal["local", "ray"]
    cluster: str
    mesh_shape: str
    num_micro_batches: int
    seed: int
    folder: Path
    save_every: int
    evaluate_every: int
    keep: int = 2

    @cached_property
    def _step(self) -> Parallelized[..., Any]:
        return alpa.parallelize(
            self.program.train_step,
            cluster=self.cluster,
            num_micro_batches=self.num_micro_batches,
            donate_argnums=0,
            schedule="1f1b",
            inter="equal-layers",
            mesh_shape=self.mesh_shape,
            executor=self.executor,
            workers=WorkerOptions(cache_directory=None) if self.executor == "ray" else None,
        )

    @cached_property
    def _evaluate(self) -> Parallelized[..., Any]:
        def evaluate(state: TrainState, batch: Any) -> Any:
            loss, _ = self.program.loss(state.params, state.model_state, batch)
            return loss

        return alpa.parallelize(evaluate, like=self._step, batch_argnums=1)

    @cached_property
    def executable(self) -> Executable:
        """The compiled step. The first access plans it and starts its workers.

        Raises:
            PlanningError: there is no plan for it.
            ClusterSizeError, WorkerError: the workers cannot be started.
        """
        return self._step.executable(self.program.state_shapes(), self._shapes)

    def steps(self) -> Iterator[tuple[int, float]]:
        """Trains without end from the last checkpoint; yields each step's number and seconds.

        The seconds exclude saving and evaluation.

        Raises:
            SoakError: a loss is not finite.
            WorkerError: a worker has failed.
        """
        first, state = alpa.resume(self.folder, self._init, self._step, self._shapes)
        leaves, structure = jax.tree.flatten(state)
        del state  # it is donated to the first step
        batches = prefetch(self.executable, self._batches(first, len(leaves)))
        loss_before: Any = None
        for number in count(first + 1):
            begin = time.perf_counter()
            *leaves, loss = self.executable(*leaves, *next(batches).values())
            if loss_before is not None:
                _check_finite("the loss before step", number, loss_before)
            loss_before = loss
            yield number, time.perf_counter() - begin
            if number % self.evaluate_every == 0:
                found = self._evaluate(jax.tree.unflatten(structure, leaves), self._batch(number))
                _check_finite("the evaluation after step", number, found)
            if number % self.save_every == 0:
                state = jax.tree.unflatten(structure, leaves)
                alpa.save(self.folder, number, state, keep=self.keep, wait=False)
                del state

    def close(self) -> None:
        """Stops its executor, and with Ray the workers."""
        alpa.wait_for_saves()
        self.executable.close()

    def _init(self) -> TrainState:
        return self.program.init_state(self.seed)

    @property
    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return self.program.batch_shapes(self.batch_size)

    def _batch(self, step: int) -> dict[str, np.ndarray]:
        """The same batch for the same step in each run."""
        drawn = self.program.random_batch(self.seed + step, self.batch_size)
        return {name: np.asarray(array) for name, array in drawn.items()}

    def _batches(self, first: int, number_of_state: int) -> Iterator[dict[int, np.ndarray]]:
        """Batches by the numbers of the step's arguments, which follow the state."""
        for step in count(first):
            arrays = jax.tree.leaves(self._batch(step))
            yield {number_of_state + n: array for n, array in enumerate(arrays)}


@contextmanager
def started(options: argparse.Namespace) -> Generator[Training]:
    """The training for a command line, with its workers, which are stopped at the end.

    With Ray it uses the cluster that this process has joined, or its own.

    Raises:
        SoakError: the model draws random numbers.
        ValueError, ClusterError: the model or the cluster is unknown, or JAX has too few devices.
        PlanningError: there is no plan for it.
        ClusterSizeError, WorkerError: the workers cannot be started.
    """
    devices = Cluster.parse(options.cluster).num_devices
    program = zoo.get(options.model)
    if any(entry.role == "key" for entry in program.config.inputs().values()):
        raise SoakError(
            f"{options.model} draws random numbers, which this run does not provide; try another"
        )
    make_devices(devices if options.executor == "local" else 1)
    with tempfile.TemporaryDirectory() as folder, _cluster(options.executor, devices):
        training = Training(
            program=program,
            batch_size=options.batch_size,
            executor=options.executor,
            cluster=options.cluster,
            mesh_shape=options.mesh_shape,
            num_micro_batches=options.num_micro_batches,
            seed=options.seed,
            folder=options.checkpoints or Path(folder),
            save_every=options.save_every,
            evaluate_every=options.evaluate_every,
        )
        try:
            yield training
        finally:
            training.close()


@contextmanager
def _cluster(executor: str, devices: int) -> Generator[None]:
    """A Ray cluster with so many CPU devices in this process, unless it has joined one."""
    if executor != "ray" or ray.is_initialized():
        yield
        return
    ray.init(
        address="local",
        num_cpus=devices,
        num_gpus=0,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _check_finite(what: str, step: int, loss: Any) -> None:
    if not np.isfinite(float(loss)):
        raise SoakError(f"{what} {step} is {float(loss)}; try another --seed")
