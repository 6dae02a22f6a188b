"""Predicted beside measured steps of zoo programs on this machine's devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import jax
import numpy as np
from jaxlib import version

from alpa.dialects import main_function
from alpa.dialects.plan import read_meshes
from alpa.passes.cost.cluster import Cluster
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.text import seconds_text
from alpa.runtime.loading import load
from alpa.runtime.planning import run_pass
from alpa.runtime.timing import TimedStep, in_turns
from alpa.tools import zoo
from alpa.tools.devices import make_devices
from alpa.tools.programs import lowered

TINY = ("gpt-tiny", "moe-tiny", "wresnet-tiny", "t5-tiny", "unet-tiny", "llama-tiny")
COLUMNS = ["model", "meshes", "micro-batches", "measured", "predicted", "ratio", "spread"]


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
    predicted: float
    """seconds"""

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
            seconds_text(self.predicted),
            f"{self.ratio:.2f}",
            f"{self.spread:.0%}",
        ]


def measure_steps(cases: Sequence[CaseHere], cluster: str, *, runs: int) -> list[StepHere]:
    """Plans programs for a cluster of this machine's devices, and times all of them in turns.

    Each is a training step at the global batch of its configuration, in the local executor.

    Raises:
        ClusterError: the cluster does not exist or is invalid.
        DevicesError: there are too few devices.
        PlanningError: a program cannot be planned.
    """
    make_devices(Cluster.parse(cluster).num_devices)
    planned = {case: _planned(case, cluster) for case in cases}
    found = in_turns({case: step for case, (step, _, _) in planned.items()}, runs=runs)
    steps: list[StepHere] = []
    for case, times in found.items():
        _, meshes, predicted = planned[case]
        low, middle, high = quantiles(times, n=4)
        steps.append(
            StepHere(
                case=case,
                meshes=meshes,
                measured=median(times),
                spread=(high - low) / 2 / middle,
                predicted=predicted,
            )
        )
    return steps


def conditions(load_before: float) -> str:
    """What times on this machine depend on, as a sentence."""
    return (
        f"{os.cpu_count()} processors, load {load_before:.1f} before and {os.getloadavg()[0]:.1f} "
        f"after, jax {jax.__version__}, jaxlib {version.__version__}"
    )


def _planned(case: CaseHere, cluster: str) -> tuple[TimedStep, tuple[str, ...], float]:
    """A compiled plan with arguments, the shapes of its meshes, and its predicted seconds."""
    program = zoo.get(case.program)
    batch_size = program.config.global_batch_size
    module = lowered(program, batch_size // case.num_micro_batches)
    options = {
        "cluster": cluster,
        "num-stages": str(case.num_stages),
        "num-micro-batches": str(case.num_micro_batches),
    }
    run_pass("alpa", options, module, Clock())
    meshes = read_meshes(main_function(module))
    shapes = tuple("x".join(map(str, mesh.logical_shape)) or "1" for mesh in meshes)
    executable = load(module)
    arguments = (program.init_state(0), program.random_batch(1, batch_size))
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
    return TimedStep(executable, arrays), shapes, executable.plan.predicted_step_seconds
