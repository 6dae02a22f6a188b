"""Predicted beside measured steps of zoo programs on this machine's devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import jax
import numpy as np
from jaxlib import version

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import seconds_text
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.step_time import seconds_in_turns, with_call
from alpa.runtime.executable import Executable
from alpa.runtime.loading import load
from alpa.runtime.planning import run_pass
from alpa.runtime.timing import TimedStep, in_turns
from alpa.tools import zoo
from alpa.tools.devices import make_devices
from alpa.tools.programs import lowered

TINY = ("gpt-tiny", "moe-tiny", "wresnet-tiny", "t5-tiny", "unet-tiny", "llama-tiny")
COLUMNS = [
    "model",
    "meshes",
    "micro-batches",
    "measured",
    "spread",
    "fastest",
    "predicted",
    "ratio",
    "predicted, meshes at once",
]


@dataclass(frozen=True, kw_only=True)
class CaseHere:
    """A zoo program, and how it is planned."""

    program: str
    num_stages: int
    num_micro_batches: int


@dataclass(frozen=True, kw_only=True)
class StepHere:
    """A planned step beside its times on this machine."""

    case: CaseHere
    meshes: tuple[str, ...]
    """the logical shapes"""
    measured: float
    """seconds of a step, the median"""
    spread: float
    """half the distance of the quartiles, over the median"""
    fastest: float
    """seconds of the fastest step"""
    predicted: float
    """seconds, with meshes that take turns as those of the local executor do"""
    at_once: float
    """predicted seconds of the plan, whose meshes work at the same time"""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    def cells(self) -> list[str]:
        """The table's cells."""
        return [
            self.case.program,
            ", ".join(self.meshes),
            str(self.case.num_micro_batches),
            seconds_text(self.measured),
            f"{self.spread:.0%}",
            seconds_text(self.fastest),
            seconds_text(self.predicted),
            f"{self.ratio:.2f}",
            seconds_text(self.at_once) if len(self.meshes) > 1 else "",
        ]


def measure_steps(cases: Sequence[CaseHere], cluster: str, *, runs: int) -> list[StepHere]:
    """Plans programs for a cluster of this machine's devices, and times all of them in turns.

    Each is a training step at the global batch of its configuration, in the local executor.

    Raises:
        ClusterError: the cluster does not exist or is invalid.
        DevicesError: there are too few devices.
        PlanningError: a program cannot be planned.
    """
    machine = Cluster.parse(cluster)
    make_devices(machine.num_devices)
    loaded = {case: _loaded(case, cluster) for case in cases}
    timed = {case: TimedStep(*it) for case, it in loaded.items()}
    steps: list[StepHere] = []
    for case, times in in_turns(timed, runs=runs).items():
        program = loaded[case][0].program
        low, middle, high = quantiles(times, n=4)
        steps.append(
            StepHere(
                case=case,
                meshes=tuple("x".join(str(n) for _, n in mesh.axes) for mesh in program.meshes),
                measured=median(times),
                spread=(high - low) / 2 / middle,
                fastest=min(times),
                predicted=with_call(seconds_in_turns(program, machine), program, machine),
                at_once=program.plan.predicted_step_seconds,
            )
        )
    return steps


def conditions(load_before: float) -> str:
    """What times on this machine depend on, as a sentence."""
    return (
        f"{os.cpu_count()} processors, load {load_before:.1f} before and {os.getloadavg()[0]:.1f} "
        f"after, jax {jax.__version__}, jaxlib {version.__version__}"
    )


def _loaded(case: CaseHere, cluster: str) -> tuple[Executable, list[np.ndarray]]:
    """A compiled plan, and arguments for its first step."""
    program = zoo.get(case.program)
    batch_size = program.config.global_batch_size
    module = lowered(program, batch_size // case.num_micro_batches)
    options = {
        "cluster": cluster,
        "num-stages": str(case.num_stages),
        "num-micro-batches": str(case.num_micro_batches),
    }
    run_pass("alpa", options, module, Clock())
    arguments = (program.init_state(0), program.random_batch(1, batch_size))
    return load(module), [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
