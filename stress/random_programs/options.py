"""Random clusters and options of the passes, drawn for a program from its seed."""

from __future__ import annotations

import numpy as np

from alpa.passes.cost.cluster import Cluster
from alpa.passes.schedules.named import NAMES
from alpa.passes.schedules.planned import chunks_of, lists_of
from alpa.passes.schedules.verify import ScheduleError
from stress.random_programs.program import RandomProgram

_STREAM = 0xC105
_CLUSTERS = ("cpu:1x1", "cpu:1x2", "cpu:1x4", "cpu:1x8", "cpu:2x1", "cpu:2x2", "cpu:2x4")
_CLUSTER_SHARES = (0.02, 0.12, 0.16, 0.06, 0.14, 0.26, 0.24)
_HEAVY = frozenset({"convolution", "dot", "scan"})
"""Kinds of ops that `clustering=equal-ops` counts."""
_INTRAS = ("data-parallel", "zero2", "zero3", "heuristic", "megatron", "none")


def draw(program: RandomProgram) -> dict[str, str]:
    """The options of `alpa{...}` by name, without those at their defaults."""
    generator = np.random.default_rng([_STREAM, program.seed])

    def chosen(share: float) -> bool:
        return bool(generator.random() < share)

    cluster = str(generator.choice(_CLUSTERS, p=_CLUSTER_SHARES))
    devices = Cluster.parse(cluster).num_devices
    options = {"cluster": cluster, "num-micro-batches": str(program.micro_batches)}
    schedule = generator.random()
    if schedule < 0.9:  # else the better of the first two
        options["schedule"] = NAMES[int(schedule / 0.9 * len(NAMES))]
    if chosen(0.4):
        options["remat"] = str(generator.choice(["none", "layer"]))
    if chosen(0.3):
        options["intra"] = str(generator.choice(_INTRAS))
    marked = any(block.boundary for block in program.blocks[:-1])
    layers = 1 + sum(block.boundary for block in program.blocks[:-1])
    if not marked:
        layers = int(generator.integers(2, min(6, len(program.blocks) + 1) + 1))
        heavy = sum(bool(block.layer.kinds & _HEAVY) for block in program.blocks)
        if chosen(0.15) and heavy:
            options["clustering"] = "equal-ops"
            layers = min(layers, heavy)
        options["num-layers"] = str(layers)
    stages = min(devices, layers, int(generator.choice([1, 2, 2, 2, 2, 3, 3, 4])))
    wanted = options.get("schedule", "1f1b")
    if chunks_of(wanted) > 1:
        shared = _stages_on_shared_meshes(wanted, devices, layers, program.micro_batches)
        return options | ({"num-stages": str(shared)} if shared else {"schedule": "1f1b"})
    if chosen(0.9):
        options["num-stages"] = str(stages)
    elif chosen(0.3) and devices % stages == 0:
        options |= {"mesh-shape": f"1x{devices // stages}", "equal-layers": "true"}
    return options


def _stages_on_shared_meshes(schedule: str, devices: int, layers: int, batches: int) -> int:
    """The most stages that a schedule of several per mesh admits; 0 if it admits none."""
    each = chunks_of(schedule)
    for meshes in (4, 2, 1):
        if devices % meshes or meshes * each > layers:
            continue
        try:
            lists_of(schedule, meshes * each, batches)
        except ScheduleError:
            continue
        return meshes * each
    return 0
