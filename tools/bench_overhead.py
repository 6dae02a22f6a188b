"""Measures the overhead of running a plan on Ray.

    python -m alpa.tools.bench_overhead --num-micro-batches 8 --transport tcp

Trains a chain of dense layers on two meshes of one CPU device, each pinned to its own core. The
baseline runs the same micro-batches in sequence in plain JAX on one core. A perfect pipeline of
S = 2 stages would divide this time by S B / (B + S - 1). A second chain is so small that its
computation does not count. It measures the minimal cost of a step: for the caller, who calls once
per mesh, and for each worker for running, sending and receiving.

Two cores share caches, memory and, on many virtual machines, the execution units of one core. What
that costs is measured by two processes of plain JAX beside each other, and the last ratio leaves it
out.

The fastest of several steps counts, because other work on the machine only makes steps longer. On a
busy machine, compare processor times. The two meshes together use more than plain JAX by the
runtime's overhead; waiting in the pipeline is not included.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
from flax import linen as nn

from alpa import passes
from alpa.runtime import WorkerOptions, load
from alpa.runtime.workers.executor import RayExecutable
from alpa.runtime.workers.messages import StepTimes
from alpa.runtime.workers.options import Transport
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row
from alpa.tools.zoo.program import Input, TrainingProgram

# One thread per mesh, which therefore uses one core.
_ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Dense layers of equal width, and samples per micro-batch."""

    width: int
    num_layers: int
    global_batch_size: int

    def model(self) -> nn.Module:
        return _Chain(self)

    def inputs(self) -> Mapping[str, Input]:
        return {"x": Input(shape=(self.width,))}


class _Chain(nn.Module):
    config: Chain

    @nn.compact
    def loss(self, x: jax.Array) -> jax.Array:
        for _ in range(self.config.num_layers):
            x = nn.tanh(nn.Dense(self.config.width)(x))
        return jnp.mean(x * x)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of the fastest step, and its parts on each mesh."""

    step: float
    meshes: dict[str, StepTimes]
    predicted: float
    """by the plan"""


def program_of(chain: Chain) -> TrainingProgram:
    return TrainingProgram(name="chain", config=chain, optimizer=optax.sgd(1e-3))


def time_pipeline(
    chain: Chain,
    num_micro_batches: int,
    schedule: str,
    transport: Transport,
    steps: int,
) -> Measured:
    """Times a step on two meshes of one device, from the call to the end of the last worker."""
    program = program_of(chain)
    options = (
        f"cluster=cpu:1x{_STAGES} num-layers={_STAGES} num-stages={_STAGES} "
        f"num-micro-batches={num_micro_batches} schedule={schedule}"
    )
    planned = passes.run(program.lower(chain.global_batch_size), f"alpa{{{options}}}")
    workers = WorkerOptions(
        platform="cpu", transport=transport, environment=_ONE_THREAD, pin_cores=True
    )
    batch = np.asarray(program.random_batch(1, chain.global_batch_size * num_micro_batches)["x"])
    state = [np.asarray(leaf) for leaf in jax.tree.leaves(program.init_state())]
    executable = load(planned, executor="ray", workers=workers)
    assert isinstance(executable, RayExecutable)
    best: Measured | None = None
    with executable as step:
        for _ in range(steps + 1):  # the first step fills connections
            begin = time.perf_counter()
            *state, _ = step(*state, batch)
            times = step.wait()
            seconds = time.perf_counter() - begin
            if best is None or seconds < best.step:
                best = Measured(
                    step=seconds,
                    meshes={name: t for name, (t,) in times.items()},
                    predicted=step.program.plan.predicted_step_seconds,
                )
    assert best is not None
    return best


def time_plain(
    chain: Chain, num_micro_batches: int, steps: int, *, processes: int
) -> list[tuple[float, float]]:
    """Times plain JAX on one core: gradients of each micro-batch, added up, and the update.

    Returns, for each of the processes, which run beside each other on a core each, the seconds of
    the fastest step, and its processor seconds.
    """
    actor: Any = ray.remote(num_cpus=1, runtime_env={"env_vars": _ONE_THREAD})(_plain_seconds)
    return ray.get(
        [actor.remote(chain, num_micro_batches, steps, core) for core in range(processes)]
    )


def _plain_seconds(
    chain: Chain, num_micro_batches: int, steps: int, core: int
) -> tuple[float, float]:
    os.sched_setaffinity(0, {core})
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    program = program_of(chain)
    state = program.init_state()
    batch = program.random_batch(1, chain.global_batch_size * num_micro_batches)["x"]
    parts = np.split(np.asarray(batch), num_micro_batches)
    gradients = jax.jit(jax.value_and_grad(program.loss, has_aux=True))
    add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)

    def update(params: Any, opt_state: Any, total: Any) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda it: it / num_micro_batches, total)
        updates, opt_state = program.optimizer.update(mean, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    compiled: Callable[..., Any] = jax.jit(update, donate_argnums=(0, 1))
    best = (float("inf"), 0.0)
    for _ in range(steps + 1):
        begin, processor, total = time.perf_counter(), time.process_time(), None
        for part in parts:
            _, gradient = gradients(state.params, state.model_state, {"x": part})
            total = gradient if total is None else add(total, gradient)
        params, opt_state = compiled(state.params, state.opt_state, total)
        state = jax.block_until_ready(state._replace(params=params, opt_state=opt_state))
        best = min(best, (time.perf_counter() - begin, time.process_time() - processor))
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--num-micro-batches", type=count, default=8)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
    parser.add_argument("--transport", choices=get_args(Transport), default="auto")
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--width", type=count, default=512, help="width of the dense layers")
    parser.add_argument("--layers", type=count, default=16, help="dense layers per stage")
    parser.add_argument("--micro-batch", type=count, default=384, help="samples")
    given = parser.parse_args(argv)
    batches = given.num_micro_batches
    large = Chain(
        width=given.width,
        num_layers=_STAGES * given.layers,
        global_batch_size=given.micro_batch,
    )
    small = Chain(width=4, num_layers=_STAGES, global_batch_size=2)
    run = (batches, given.schedule, given.transport, given.steps)
    large_step, small_step = time_pipeline(large, *run), time_pipeline(small, *run)
    [(plain, plain_processor)] = time_plain(large, batches, given.steps, processes=1)
    beside = time_plain(large, batches, given.steps, processes=_STAGES)
    ideal = _STAGES * batches / (batches + _STAGES - 1)
    stage = plain / batches / _STAGES
    gain = plain / large_step.step
    print(f"stage {1e3 * stage:.1f} ms per micro-batch, {batches} micro-batches, {given.schedule}")
    print(f"plain JAX on one core {1e3 * plain:.1f} ms, two meshes {1e3 * large_step.step:.1f} ms")
    print(f"speed-up {gain:.3f} of the ideal {ideal:.3f}: {gain / ideal:.3f}")
    print(f"processor time of plain JAX {1e3 * plain_processor:.1f} ms")
    shared = max(seconds for seconds, _ in beside) / plain
    print(f"two processes of plain JAX beside each other take {shared:.3f} times as long as one;")
    print(f"of the ideal on such cores: {gain / ideal * shared:.3f}")
    print()
    print(markdown_header(["ms per step", "in all", "processor", "run", "send", "receive"]))
    for text, measured in (("large", large_step), ("small", small_step)):
        for mesh, times in measured.meshes.items():
            cells = [times.total, times.processor, times.run, times.send, times.receive]
            print(markdown_row([f"{text}, {mesh}", *(f"{1e3 * it:.2f}" for it in cells)]))
    print()
    longest = max(times.total for times in small_step.meshes.values())
    caller = small_step.step - longest
    print(
        f"the caller costs {1e3 * caller:.2f} ms per step, {1e6 * caller / batches:.0f} µs ", end=""
    )
    print(f"per micro-batch; the instructions {1e6 * longest / batches:.0f} µs per micro-batch")


if __name__ == "__main__":
    sys.exit(until_interrupted("bench_overhead", main))
