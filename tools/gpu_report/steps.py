"""A training step on one device: planned beside plain `jax.jit`, predicted beside measured."""

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
from alpa.runtime.ahead_of_time.verification import predicted_peaks
from alpa.runtime.comparison import difference
from alpa.runtime.exported import exported
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
    """Seconds and memory of a step, and the losses of the first ones."""

    model: Model
    plain: float
    planned: float
    predicted: float
    predicted_bytes: int
    """the peak of the device's memory"""
    bytes: int | None
    """the same, as the device's allocator counts it; None if it does not"""
    losses: int
    """those that were compared, of the first steps: as many as plain JAX itself repeats"""
    loss_error: float
    """their largest difference, as a share of plain JAX's"""
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

    @property
    def memory_prediction(self) -> float | None:
        """Predicted over measured bytes."""
        return None if self.bytes is None else self.predicted_bytes / self.bytes


def time_model(model: Model, cluster: str, *, rounds: int, steps: int) -> StepTimes:
    """Times a model on this process's first device, whose memory nothing else has used.

    Args:
        model: which.
        cluster: one device, as `alpa.parallelize` takes it.
        rounds: how often planned and plain steps are timed, in turn; the median counts.
        steps: steps of a round. Only the last one is waited for.

    Raises:
        RuntimeError: XLA cannot compile or run the model.
    """
    try:
        return _time_model(model, cluster, rounds, steps)
    except jax.errors.JaxRuntimeError as error:
        # Errors of jaxlib cannot be sent to another process.
        raise RuntimeError(f"{model.program}: {error}") from None


def _time_model(model: Model, cluster: str, rounds: int, steps: int) -> StepTimes:
    program = zoo.get(model.program, dtype=jnp.bfloat16)
    first = jax.devices()[0]
    state = jax.device_get(jax.jit(program.init_state)())
    batch = jax.device_put(program.random_batch(1, model.batch_size), first)
    planned = alpa.parallelize(
        program.train_step,
        cluster=cluster,
        donate_argnums=0,
        micro_batches="independent" if model.independent else "exact",
        devices=[first],
    )
    plan = planned.prepare(state, batch).plan
    peaks = predicted_peaks(exported(plan.module))
    runs = [_Run(planned, jax.device_put(state, first), batch)]
    found = runs[0].losses(_COMPARED)
    statistics = first.memory_stats()  # before the other step needs memory
    plain_step = jax.jit(program.train_step, donate_argnums=0)
    again = _Run(plain_step, jax.device_put(state, first), batch).losses(_COMPARED)
    runs.insert(0, _Run(plain_step, jax.device_put(state, first), batch))
    losses = repeated(runs[0].losses(_COMPARED), again)
    compared = [
        difference(other, plain, dtype="bfloat16")
        for plain, other in zip(losses, found, strict=False)
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for run, times in zip(runs, seconds, strict=True):
            times.append(run.seconds(steps))
    plain, measured = (median(times) for times in seconds)
    errors = [it.error / abs(float(loss)) for it, loss in zip(compared, losses, strict=True)]
    return StepTimes(
        model=model,
        plain=plain,
        planned=measured,
        predicted=plan.predicted_step_seconds,
        predicted_bytes=max(peaks.values()),
        bytes=statistics["peak_bytes_in_use"] if statistics else None,
        losses=len(losses),
        loss_error=max(errors),
        is_equal=all(it.ok for it in compared),
    )


def repeated(losses: Sequence[np.ndarray], again: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The losses before the first one that a second run does not repeat, and at least one.

    The gradients of some convolutions differ from run to run on a GPU.
    """
    found = list(losses[:1])
    for one, other in zip(losses[1:], again[1:], strict=True):
        if not difference(other, one, dtype="bfloat16").ok:
            break
        found.append(one)
    return found


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
