"""Stages on meshes that exist already, on which state lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from alpa.dialects.plan import MeshAssignment
from alpa.dialects.sharding import Sharding
from alpa.passes.sharding.user_shardings import UserShardings
from alpa.passes.solve.stages.problem import Given, Objective
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.cut_stages import check_hosts, stages_of
from alpa.passes.stages.intervals import intervals
from alpa.passes.stages.merge import Place, Stages
from alpa.passes.stages.search import Search
from alpa.passes.workers import Workers


@dataclass(frozen=True, kw_only=True)
class ExistingMeshes:
    """Stages on given meshes in their order. A mesh may stay without layers."""

    objective: Objective
    meshes: tuple[MeshAssignment, ...]
    held: Mapping[int, Mapping[int, Sharding]]
    """where arguments lie already, by argument and mesh"""
    over_hosts: bool
    """whether a mesh may span several hosts"""

    def cut(self, program: Clustered, costs: LayerCosts, workers: Workers) -> Stages:
        """Of the cuts that move the fewest bytes of what the meshes hold, the fastest one."""
        cluster = program.cluster
        for mesh in self.meshes:
            check_hosts(program, f"@{mesh.name}", mesh.hosts, self.over_hosts)
        hosts = [-1, *map(cluster.host_of, range(cluster.num_devices)), -1]
        far = tuple(
            (hosts[m.devices[0]] != m.hosts[0], hosts[m.devices[-1] + 2] != m.hosts[-1])
            for m in self.meshes
        )
        moved = self._moved(program)
        cut = Search(
            program=program,
            costs=costs,
            workers=workers,
            submeshes=[
                (
                    cluster.number_of(m.hosts),
                    (len(m.hosts), len(m.devices) // len(m.hosts), m.logical_shape),
                )
                for m in self.meshes
            ],
            most_stages=len(self.meshes),
            restrict=lambda problem, mesh_of: replace(
                problem,
                minimise=self.objective,
                given=Given(mesh_of=tuple(mesh_of), far=far, moved=moved),
            ),
        ).run()
        stages = stages_of(program, cut, list(self.meshes), cut.meshes)
        held = {(a, mesh): it for a, places in self.held.items() for mesh, it in places.items()}
        if program.given is not None:
            held = _admitted(held, program.given, stages.shardings)
        return replace(stages, shardings={**stages.shardings, **held})

    def _moved(self, program: Clustered) -> np.ndarray:
        """Bytes that layers i..j read on mesh q and that are held elsewhere only, [K, K, Q]."""
        count, graph = program.num_layers, program.graph
        moved = np.zeros((count, count, len(self.meshes)))
        for argument, places in self.held.items():
            layers = (program.origins[o].layer for o in graph.users[argument])
            reads = np.zeros(count)
            reads[[layer for layer in layers if layer is not None]] = 1
            any_reads = intervals(reads) > 0
            elsewhere = [q for q in range(len(self.meshes)) if q not in places]
            moved[:, :, elsewhere] += (any_reads * graph.bytes[argument])[:, :, None]
        return moved


def _admitted(
    held: Mapping[Place, Sharding], given: UserShardings, asked: Mapping[Place, Sharding]
) -> dict[Place, Sharding]:
    """Where arguments lie, over the axes that the program names, as far as the program admits it.

    Args:
        held: the places of arguments, over `axis0`, `axis1`, ...
        given: the program's mesh.
        asked: the shardings that the program gives arguments.
    """
    names = {f"axis{number}": name for number, name in enumerate(given.axis_names)}
    found: dict[Place, Sharding] = {}
    for place, sharding in held.items():
        dims = tuple(tuple(names[axis] for axis in dim) for dim in sharding.axis_names)
        lies = Sharding.of(sharding.mesh, dims)
        if place not in asked or asked[place].on(given.mesh).admits(lies):
            found[place] = lies
    return found
