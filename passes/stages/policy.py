"""Which stages and meshes a plan may have: all of the search, or a restriction.

* `ProgramMesh`: the program's own shardings name the one mesh. Nothing is searched.
* `ExistingMeshes` (`existing_meshes.py`): the meshes exist already, and state lies on them.
* `SharedMeshes` (`shared_meshes.py`): equal meshes with several stages each.
* `AnyMeshes`: submeshes of the cluster, as many as are best. The paper's baseline of equal layers,
  a number of stages and a shape of all meshes restrict this search. If the program's own shardings
  name the mesh of one stage, that is the shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from alpa.dialects.plan import Dropped, MeshAssignment
from alpa.passes.base import MeshOverHostsError, NoRoomError, NotFasterError, PassError
from alpa.passes.cost.cluster import AnyCluster, Cluster
from alpa.passes.schedules.planned import T_SCHEDULES, own
from alpa.passes.sharding.baselines import axes_differ
from alpa.passes.sharding.user_shardings import UserShardings
from alpa.passes.solve.stages import placement
from alpa.passes.solve.stages.problem import Objective, Problem
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.clustered import Clustered, even_seconds
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.cut_stages import WITHIN, check_hosts, fastest, stages_of
from alpa.passes.stages.existing_meshes import ExistingMeshes
from alpa.passes.stages.fixed_stages import FixedStage, check_fixed, restricted, with_shapes
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.search import Cut, Search
from alpa.passes.workers import Workers


@dataclass(frozen=True, kw_only=True)
class ProgramMesh:
    """One stage on the mesh that the program's shardings name."""

    given: UserShardings
    over_hosts: bool
    """whether a mesh may span several hosts; so for the others"""

    def cut(self, program: Clustered, costs: LayerCosts, workers: Workers) -> Stages:
        """All layers, with seconds split evenly: no more is known before they are sharded."""
        cluster, batches = program.cluster, program.plan.num_micro_batches
        if len(cluster.kinds) > 1:
            raise PassError(
                program.function,
                f"the program's shardings over @{self.given.name} fix one mesh, and the cluster "
                "has hosts of several kinds; plan for hosts of one kind, or remove the shardings",
            )
        check_hosts(program, f"@{self.given.name}", range(cluster.hosts), self.over_hosts)
        seconds = even_seconds(program.function, cluster, batches)
        mesh = MeshAssignment(
            name=self.given.name,
            hosts=tuple(range(cluster.hosts)),
            devices=tuple(range(cluster.num_devices)),
            logical_shape=self.given.mesh.sizes,
        )
        return Stages(
            layer_stage=dict.fromkeys(range(program.num_layers), 0),
            meshes=[mesh],
            seconds=seconds,
            bound=seconds,
            given=self.given,
            rematerialised=program.always_rematerialised,
            shardings=self.given.on([mesh.name]),
        )


@dataclass(frozen=True, kw_only=True)
class AnyMeshes:
    """Stages on submeshes of the cluster that together are all of it."""

    objective: Objective
    num_stages: int | None
    mesh_shape: tuple[int, ...] | None
    """the logical shape of every mesh; None: searched"""
    mesh_rank: int
    equal_layers: bool
    fixed: tuple[FixedStage, ...]
    """stages that the cut must have"""
    over_hosts: bool
    device: str = ""
    """the only device that stages may be on, where hosts are of several kinds"""
    equal_meshes: bool = False
    """whether all stages have the same submesh in the same logical shape; hosts, of one kind, may
    stay idle"""

    def cut(self, program: Clustered, costs: LayerCosts, workers: Workers) -> Stages:
        """The cut that takes the least time."""
        if self.equal_layers and len(program.cluster.kinds) > 1:
            raise PassError(
                program.function,
                "equal-layers is for equal stages, and the cluster has hosts of several kinds; "
                "plan for hosts of one kind, or leave equal-layers out",
            )
        limit = min(program.num_layers, program.cluster.num_devices)
        if self.num_stages is not None and not 1 <= self.num_stages <= limit:
            raise PassError(
                program.function,
                f"cannot make {self.num_stages} stages of {program.num_layers} layer(s) on "
                f"{program.cluster.num_devices} device(s); num-stages can be at most {limit}",
            )
        self._check_stages(program)
        check_fixed(self.fixed, program.num_layers, program.cluster)
        self._check_shapes(program)
        submeshes = with_shapes(self._submeshes(program), self.fixed)

        def restrict(problem: Problem, numbers: Sequence[int]) -> Problem:
            problem = replace(
                problem,
                minimise=self.objective,
                num_stages=self.num_stages,
                equal_layers=self.equal_layers,
                equal_meshes=tuple(numbers) if self.equal_meshes else None,
            )
            return restricted(problem, self.fixed, [submeshes[n][1] for n in numbers])

        search = Search(
            program=program,
            costs=costs,
            workers=workers,
            submeshes=submeshes,
            most_stages=self.num_stages,
            restrict=restrict,
            may_be_idle=self.equal_meshes,
        )
        try:
            cut = search.run()
        except (NoRoomError, NotFasterError):
            raise
        except PassError as error:
            if not self.fixed:
                raise
            text = ",".join(map(str, self.fixed))
            raise PassError(
                program.function,
                f"no cut has the stages fixed-stages={text}: {error.message}; stages use all "
                "devices of the cluster",
            ) from error
        is_t = program.plan.schedule in T_SCHEDULES or own(program.plan.schedule) is not None
        if self.objective == "step" and not is_t:
            cut = fastest(program, cut)
        meshes = placed(cut, program.cluster)
        stages = stages_of(program, cut, meshes, range(len(meshes)))
        stages = replace(stages, dropped=(*stages.dropped, *self._left_out(program)))
        return replace(stages, bound=cut.bound) if self.objective == "step" and is_t else stages

    def _check_stages(self, program: Clustered) -> None:
        """Raises MeshOverHostsError if there are fewer stages than hosts, and each needs its own.

        Of hosts of several kinds, some may stay idle.
        """
        hosts = program.cluster.hosts
        if self.over_hosts or len(program.cluster.kinds) > 1:
            return
        need = f"{WITHIN}, so {hosts} hosts need at least {hosts} stages"
        if self.num_stages is not None and self.num_stages < hosts:
            raise MeshOverHostsError(
                program.function,
                f"{need}, and num-stages is {self.num_stages}; leave num-stages out, or plan for a "
                f"cluster of at most {self.num_stages} host(s)",
            )
        if program.num_layers < hosts:
            raise MeshOverHostsError(
                program.function,
                f"{need}, and the program has {program.num_layers} layer(s); cut it into more "
                "(num-layers, alpa.mark_layer_boundary), or plan for a cluster of at most "
                f"{program.num_layers} host(s)",
            )

    def _check_shapes(self, program: Clustered) -> None:
        """Raises PassError for a fixed stage in another shape than the program's mesh."""
        for stage in self.fixed:
            if program.given is not None and stage.shape not in (None, self.mesh_shape):
                raise PassError(
                    program.function,
                    f"the program's shardings are over {program.given}, so fixed-stages={stage} is "
                    "not possible; leave out its logical shape, or the shardings",
                )

    def _submeshes(self, program: Clustered) -> Sequence[tuple[int, Submesh]]:
        """The paper's submeshes in their logical shapes, or those of the given shape, each with the
        kind of its hosts."""
        shape = self.mesh_shape
        every = [
            (number, submesh)
            for number, kind in enumerate(program.cluster.kinds)
            if self.device in ("", kind.device.name)
            for submesh in self._sizes(program, kind)
        ]
        if shape is None:
            ordered = axes_differ(program.intra)
            return [
                (kind, (*submesh, seen))
                for kind, submesh in every
                for seen in logical_shapes(*submesh, self.mesh_rank, ordered=ordered)
            ]
        found = [(kind, (n, m, shape)) for kind, (n, m) in every if n * m == prod(shape)]
        seen = "x".join(map(str, shape))
        what = f"mesh-shape {seen}" if program.given is None else f"the program's {program.given}"
        if (
            not found
            and not self.over_hosts
            and any(
                kind.hosts > 1 and prod(shape) % kind.devices_per_host == 0
                for kind in program.cluster.kinds
            )
        ):
            most = max(kind.devices_per_host for kind in program.cluster.kinds)
            raise MeshOverHostsError(
                program.function,
                f"{WITHIN}, and {what} has {prod(shape)} devices; "
                f"a host has {most}, so give a shape of so many devices at most",
            )
        if not found:
            wholes = ", ".join(f"{it.hosts}x{it.devices_per_host}" for it in program.cluster.kinds)
            raise PassError(
                program.function,
                f"{what} has {prod(shape)} devices; "
                f"equal submeshes of {wholes} have "
                f"{', '.join(dict.fromkeys(str(n * m) for _, (n, m) in every))}",
            )
        return found

    def _sizes(self, program: Clustered, kind: Cluster) -> Sequence[tuple[int, int]]:
        """The submeshes of one kind of hosts, as they are tried; few if there are many hosts."""
        hosts = kind.hosts, kind.devices_per_host
        if self.mesh_shape is not None or self.fixed:
            found = placement.submeshes(*hosts)
        else:
            found = placement.few_submeshes(*hosts, self.num_stages or program.num_layers)
        return self._allowed(kind, found)

    def _allowed(
        self, kind: Cluster, submeshes: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Those that lie inside a host, if they must, and divide one, if all stages are equal."""
        each = kind.devices_per_host
        equal = self.mesh_shape is not None or self.equal_layers or self.equal_meshes
        return [
            (n, m) for n, m in submeshes if (n == 1 or self.over_hosts) and not (equal and each % m)
        ]

    def _has_room(self, program: Clustered, size: int) -> bool:
        """Whether a mesh may have so many devices, if each other stage has one at least."""
        others = (self.num_stages or 1) - 1
        is_right = self.mesh_shape is None or size == prod(self.mesh_shape)
        return is_right and size + others <= program.cluster.num_devices

    def _left_out(self, program: Clustered) -> Iterator[Dropped]:
        """The submeshes that are not tried."""
        for kind in program.cluster.kinds:
            sizes = self._sizes(program, kind)
            every = placement.submeshes(kind.hosts, kind.devices_per_host)
            over = (n * m for n, m in every if n > 1)
            if not self.over_hosts and any(self._has_room(program, size) for size in over):
                yield Dropped(what=OVER_HOSTS, reason=WITHIN)
            every = self._allowed(kind, every)
            if len(sizes) < len(every):
                tried = ", ".join(f"{n}x{m}" for n, m in sizes)
                reason = f"a cluster of {kind.hosts} hosts has too many to try all"
                yield Dropped(what=f"every submesh but {tried}", reason=reason)


OVER_HOSTS = "every mesh over several hosts"
"""`Dropped.what` of a search that kept to meshes inside hosts, though the cluster has room for
others."""
Policy = ProgramMesh | AnyMeshes | ExistingMeshes
"""Cuts a program into the best stages that are allowed. `cut` raises PassError."""


def placed(cut: Cut, cluster: AnyCluster) -> list[MeshAssignment]:
    """A mesh for each stage of a cut, in their order."""
    first = [0, *accumulate(cluster.host_sizes)]
    places = placement.place_on_kinds(
        [(kind.hosts, kind.devices_per_host) for kind in cluster.kinds],
        [it.submesh[:2] for it in cut.candidates],
        cut.kinds,
    )
    return [
        MeshAssignment(
            name=f"mesh_{stage}",
            hosts=tuple(dict.fromkeys(host for host, _ in place)),
            devices=tuple(first[host] + device for host, device in place),
            logical_shape=found.submesh[2],
            device=cluster.device_name([host for host, _ in place]),
        )
        for stage, (place, found) in enumerate(zip(places, cut.candidates, strict=True))
    ]


def logical_shapes(
    hosts: int, devices: int, rank: int, *, ordered: bool = False
) -> list[tuple[int, ...]]:
    """The logical shapes of a submesh: one axis, or the different factorings into two axes.

    Inside a host all links are equal, so the order of the axes does not matter. Over several hosts
    the last axis stays inside a host. With `ordered` the axes have different meanings: (a, b) and
    (b, a) differ, and an axis of size 1 is allowed, too.
    """
    count = hosts * devices
    if ordered:
        return [(count // a, a) for a in range(devices, 0, -1) if devices % a == 0]
    if hosts > 1:
        found = [(count // a, a) for a in range(devices, 1, -1) if devices % a == 0]
        return found or [(hosts, devices)]
    if rank == 1:
        return [(count,)]
    found = [(a, count // a) for a in range(2, count) if count % a == 0 and a * a <= count]
    return found or [(count,)]
