"""Training steps on one device: planned beside plain `jax.jit`, predicted beside measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime.comparison import difference
from alpa.tools import zoo

Step = Callable[[Any, Any], tuple[Any, Any]]

_COMPARED = 3
"""Steps whose losses are compared."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the zoo, trained in bf16 with f32 parameters."""

    program: str
    batch_size: int
    independent: bool = False
    """whether it has batch statistics, which belong to a micro-batch"""


MODELS = (
    Model(program="gpt-350m", batch_size=4),
    Model(program="moe-380m", batch_size=4),
    Model(program="wresnet-250m", batch_size=32, independent=True),
)
TINY_MODELS = (
    Model(program="gpt-tiny", batch_size=4),
    Model(program="moe-tiny", batch_size=4),
    Model(program="wresnet-tiny", batch_size=4, independent=True),
)


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of a step, and the losses of the first ones."""

    model: Model
    plain: float
    planned: float
    predicted: float
    loss_error: float
    """the largest difference of the losses, as a share of plain JAX's"""
    is_equal: bool
    """whether all losses are equal within the bound of bf16"""

    @property
    def ratio(self) -> float:
        """Planned over plain JAX."""
        return self.planned / self.plain

    @property
    def prediction(self) -> float:
        """Predicted over measured, as planned."""
        return self.predicted / self.planned


def time_models(
    models: Sequence[Model], cluster: str, *, rounds: int, steps: int
) -> list[StepTimes]:
    """Times models on this process's first device.

    Args:
        models: which.
        cluster: one device, as `alpa.parallelize` takes it.
        rounds: how often planned and plain steps are timed, in turn; the median counts.
        steps: steps of a round. Only the last one is waited for.

    Raises:
        RuntimeError: XLA cannot compile or run a model.
    """
    found: list[StepTimes] = []
    for model in models:
        try:
            found.append(_time_model(model, cluster, rounds, steps))
        except jax.errors.JaxRuntimeError as error:
            # Errors of jaxlib cannot be sent to another process.
            raise RuntimeError(f"{model.program}: {error}") from None
    return found


def _time_model(model: Model, cluster: str, rounds: int, steps: int) -> StepTimes:
    program = zoo.get(model.program, dtype=jnp.bfloat16)
    state, batch = program.init_state(), program.random_batch(1, model.batch_size)
    planned = alpa.parallelize(
        program.train_step,
        cluster=cluster,
        donate_argnums=0,
        micro_batches="independent" if model.independent else "exact",
        devices=jax.devices()[:1],
    )
    predicted = planned.prepare(state, batch).plan.predicted_step_seconds
    runs = [
        _Run(step, jax.tree.map(jnp.copy, state), batch)
        for step in (jax.jit(program.train_step, donate_argnums=0), planned)
    ]
    del state
    losses = list(zip(*(run.losses(_COMPARED) for run in runs), strict=True))
    compared = [difference(other, plain, dtype="bfloat16") for plain, other in losses]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, found in zip(runs, seconds, strict=True):
            found.append(run.seconds(steps))
    plain, measured = (median(found) for found in seconds)
    errors = [it.error / abs(float(loss)) for it, (loss, _) in zip(compared, losses, strict=True)]
    return StepTimes(
        model=model,
        plain=plain,
        planned=measured,
        predicted=predicted,
        loss_error=max(errors),
        is_equal=all(it.ok for it in compared),
    )


class _Run:
    """A training run with one step function."""

    def __init__(self, step: Step, state: Any, batch: Any) -> None:
        self._step, self._state, self._batch = step, state, batch

    def losses(self, steps: int) -> list[np.ndarray]:
        """Compiles the step, and returns the losses of the first ones."""
        found: list[np.ndarray] = []
        for _ in range(steps):
            self._state, loss = self._step(self._state, self._batch)
            found.append(np.asarray(loss))
        return found

    def seconds(self, steps: int) -> float:
        """Seconds of a step, averaged over some steps."""
        jax.block_until_ready(self._state)
        begin = time.perf_counter()
        for _ in range(steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / steps
