"""What a cut makes of a program: the stages, their meshes, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects.plan import MeshAssignment
from alpa.passes.base import MeshOverHostsError
from alpa.passes.schedules.planned import in_flight
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.search import Cut

WITHIN = "meshes-over-hosts=false keeps each mesh inside one host"


def check_hosts(program: Clustered, mesh: str, hosts: Sequence[int], over_hosts: bool) -> None:
    """Raises MeshOverHostsError for a given mesh that may not span hosts."""
    if len(hosts) > 1 and not over_hosts:
        raise MeshOverHostsError(
            program.function,
            f"{WITHIN}, and the given mesh {mesh} spans {len(hosts)} hosts; plan for a cluster of "
            "one host, or give other meshes",
        )


def stages_of(
    program: Clustered, cut: Cut, meshes: list[MeshAssignment], numbers: Sequence[int]
) -> Stages:
    """The stages of a cut, by the number of each stage's mesh, with the program's own shardings on
    every mesh."""
    plan, given, peaks = program.plan, program.given, [0] * len(meshes)
    layer_stage: dict[int, int] = {}
    again: set[int] = set()
    for mesh, stage, found in zip(numbers, cut.stages, cut.candidates, strict=True):
        batches = in_flight(plan.schedule, plan.num_micro_batches, len(meshes) - mesh, len(meshes))
        kept = batches * found.activation_bytes[stage.first, stage.last]
        peaks[mesh] = int(found.fixed_bytes[stage.first, stage.last] + kept)
        layer_stage |= dict.fromkeys(range(stage.first, stage.last + 1), mesh)
        again.update(found.rematerialised(stage.first, stage.last))
    return Stages(
        layer_stage=layer_stage,
        meshes=meshes,
        seconds=cut.seconds,
        peak_bytes=tuple(peaks),
        given=given,
        shardings={} if given is None else given.on([mesh.name for mesh in meshes]),
        rematerialised=program.always_rematerialised | again,
        dropped=cut.dropped,
    )
