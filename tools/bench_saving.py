"""Measures what saving a state costs the steps beside it.

    python -m alpa.tools.bench_saving --megabytes 200 --executors local ray

Trains a chain of dense layers with momentum on one CPU device. A round has steps without a save; a
save with `wait=False`, and steps for as long as it is in flight; steps without a save again; and a
save with `wait=True`. A step's time is from its call until its loss is read. Medians count. The
growth compares the steps of each round, because other work on the machine changes from round to
round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.checkpoints.background import background
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row

_STATE_PER_PARAMETER = 2 * 4  # bytes: it and its momentum, in f32


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Dense layers of equal width, and samples per step."""

    width: int
    num_layers: int
    samples: int

    def init(self) -> Any:
        keys = jax.random.split(jax.random.key(0), self.num_layers)
        shape, scale = (self.width, self.width), self.width**-0.5
        params = [scale * jax.random.normal(key, shape) for key in keys]
        return params, jax.tree.map(jnp.zeros_like, params)

    def batch(self) -> np.ndarray:
        return np.random.default_rng(0).normal(size=(self.samples, self.width)).astype(np.float32)


def train_step(state: Any, x: Any) -> Any:
    """A step of gradient descent with momentum towards small outputs."""

    def loss_fn(params: Any) -> Any:
        y = x
        for weight in params:
            y = jnp.tanh(y @ weight)
        return jnp.mean(y * y)

    params, velocity = state
    loss, grads = alpa.value_and_grad(loss_fn)(params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - 1e-3 * v, params, velocity)
    return (params, velocity), loss


@dataclass(kw_only=True)
class Measured:
    """Seconds of steps without a save and beside one, by rounds, and of calls of `save`."""

    alone: list[list[float]] = field(default_factory=list[list[float]])
    beside: list[list[float]] = field(default_factory=list[list[float]])
    save_returns: list[float] = field(default_factory=list[float])
    save_is_written: list[float] = field(default_factory=list[float])
    save_waits: list[float] = field(default_factory=list[float])


def time_saving(
    model: Chain, executor: Literal["local", "ray"], rounds: int, steps: int, folder: Path
) -> Measured:
    """Times steps and saves of a chain; the checkpoints are written to a folder."""
    step: Any = alpa.parallelize(
        train_step,
        cluster="cpu:1x1",
        donate_argnums=0,
        executor=executor,
        workers=WorkerOptions(platform="cpu") if executor == "ray" else None,
    )
    batch = model.batch()
    state = alpa.create_state(model.init, step, batch)
    found, number = Measured(), 0

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        state, loss = step(state, batch)
        float(loss)
        return time.perf_counter() - begin

    def save(wait: bool) -> float:
        nonlocal number
        begin, number = time.perf_counter(), number + 1
        alpa.save(folder, number, state, keep=1, wait=wait)
        return time.perf_counter() - begin

    for _ in range(3):  # the first ones compile and fill connections
        run()
    save(wait=True)
    for _ in range(rounds):
        before = [run() for _ in range(steps)]
        begin = time.perf_counter()
        found.save_returns.append(save(wait=False))
        beside = [run()]
        while background().is_writing:
            beside.append(run())
        found.save_is_written.append(time.perf_counter() - begin)
        found.beside.append(beside)
        found.alone.append(before + [run() for _ in range(steps)])
        found.save_waits.append(save(wait=True))
    step.executable(state, batch).close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_saving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--executors", nargs="+", choices=["local", "ray"], default=["local"])
    parser.add_argument("--megabytes", type=count, default=200, help="size of the state")
    parser.add_argument("--width", type=count, default=1024, help="width of the dense layers")
    parser.add_argument("--samples", type=count, default=64, help="samples per step")
    parser.add_argument("--rounds", type=count, default=10, help="saves of each kind")
    parser.add_argument("--steps", type=count, default=5, help="steps before each save")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    given = parser.parse_args(argv)
    layers = max(1, round(given.megabytes * 1e6 / _STATE_PER_PARAMETER / given.width**2))
    model = Chain(width=given.width, num_layers=layers, samples=given.samples)
    size = layers * given.width**2 * _STATE_PER_PARAMETER
    print(f"a state of {size / 1e6:.0f} MB; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print()
    columns = ["executor", "step alone", "step beside a save", "growth (range)"]
    columns += ["steps beside saves"]
    columns += ["`wait=False` returns", "is written", "`wait=True`"]
    print(markdown_header(columns))
    for executor in given.executors:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found = time_saving(model, executor, given.rounds, given.steps, Path(folder))
        print(markdown_row([executor, *_cells(found)]), flush=True)


def _cells(found: Measured) -> list[str]:
    def ms(them: Sequence[float]) -> str:
        return f"{1e3 * median(them):.0f} ms"

    rounds = zip(found.beside, found.alone, strict=True)
    growth = sorted(median(beside) / median(alone) - 1 for beside, alone in rounds)
    beside = [*chain.from_iterable(found.beside)]
    return [
        ms([*chain.from_iterable(found.alone)]),
        ms(beside),
        f"{median(growth):+.0%} ({growth[0]:+.0%} to {growth[-1]:+.0%})",
        str(len(beside)),
        ms(found.save_returns),
        ms(found.save_is_written),
        ms(found.save_waits),
    ]


if __name__ == "__main__":
    sys.exit(until_interrupted("bench_saving", main))
