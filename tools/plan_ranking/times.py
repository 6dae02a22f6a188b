"""The real seconds of plans: by a roofline over the compiler's programs, or measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import jax

from alpa import runtime
from alpa.dialects import main_function
from alpa.passes.cost.cluster import Cluster
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.plan.data import Program
from alpa.passes.plan.step_time import seconds_in_turns, step_seconds, with_call
from alpa.runtime.ahead_of_time.compilation import final_programs
from alpa.runtime.ahead_of_time.roofline import compiled_step_seconds, spent
from alpa.runtime.exported import Exported, exported, module_name
from alpa.runtime.timing import TimedStep, in_turns
from alpa.tools.plan_ranking.plans import RankedPlan
from alpa.tools.plan_ranking.programs import RankedProgram


def roofline_seconds(
    plans: Sequence[RankedPlan], *, processes: int | None = None, cache: Path | None = None
) -> list[float]:
    """Seconds of a step, by what the compiler of the plans' GPUs makes of their stages.

    Raises:
        CompilationError: there is no compiler for the device, or it refuses a stage.
        HloError: its program cannot be read.
    """
    stages = [exported(plan.module) for plan in plans]
    cluster = plan_and_cluster(main_function(stages[0].module))[1]
    texts = final_programs(stages, processes=processes, cache=cache)
    return [
        _step_seconds(one, programs, cluster) for one, programs in zip(stages, texts, strict=True)
    ]


def _step_seconds(stages: Exported, texts: Mapping[str, str], cluster: Cluster) -> float:
    meshes = {mesh.name: mesh for mesh in stages.program.meshes}
    seconds: dict[str, float] = {}
    for fragment in stages.program.fragments:
        mesh, name = meshes[fragment.mesh], module_name(fragment)
        hosts = len(mesh.hosts)
        found = spent(texts[name], cluster, hosts, len(mesh.devices) // hosts)
        seconds[name] = found.seconds
    return compiled_step_seconds(stages.program, seconds)


def predicted_seconds(plan: RankedPlan) -> float:
    """Predicted seconds of a step, of the modules that run: of merged fragments, not of the parts
    that they are made of."""
    program, cluster = _that_runs(plan)
    return with_call(step_seconds(program), program, cluster)


def predicted_in_turns(plan: RankedPlan) -> float:
    """As `predicted_seconds`, in the local executor, whose meshes take turns on CPU devices."""
    program, cluster = _that_runs(plan)
    return with_call(seconds_in_turns(program, cluster), program, cluster)


def _that_runs(plan: RankedPlan) -> tuple[Program, Cluster]:
    stages = exported(plan.module)
    return stages.program, plan_and_cluster(main_function(stages.module))[1]


def measured_seconds(
    program: RankedProgram, plans: Sequence[RankedPlan], *, runs: int
) -> list[float]:
    """Median seconds of a step on this machine's devices; the plans take turns.

    Raises:
        LoadError: a plan cannot be run.
        ValueError: there are too few devices.
    """
    training = program.training()
    batch = training.random_batch(1, program.batch_size)
    arguments = jax.device_get(jax.tree.leaves((training.init_state(0), batch)))
    steps = {
        number: TimedStep(runtime.load(plan.module), arguments) for number, plan in enumerate(plans)
    }
    seconds = in_turns(steps, runs=runs, before=1)
    return [median(seconds[number]) for number in steps]
