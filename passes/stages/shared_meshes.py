"""Several stages on each mesh, for schedules that have them: interleaved 1F1B and the V schedules.

The meshes are equal in size and logical shape. With v stages on each of p meshes, the layers are
cut into p v stages by the stage DP, as if there were v times the devices, each with 1/v of the
memory: a stage takes up to its even share of its mesh. So all stages get about equally long, as
these schedules need. The schedule then says which mesh each stage is on.

Numbers of meshes, logical shapes and the cuts that the DP finds on its way are compared by the
simulated schedule (`cut_stages.fastest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from alpa.dialects.plan import MeshAssignment
from alpa.passes.base import NoRoomError, NotFasterError, PassError, fresh, kept
from alpa.passes.schedules.planned import chunks_of, label
from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.schedules.work import WorkLists
from alpa.passes.solve.stages import placement
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import Problem, Stage
from alpa.passes.stages.balance import Balance
from alpa.passes.stages.candidates import Candidate
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.clustered import USELESS, Clustered
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.cut_stages import fastest, peak_bytes, schedule_on, stages_of
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.policy import logical_shapes, placed
from alpa.passes.stages.search import Cut, Search
from alpa.passes.workers import Workers


@dataclass(frozen=True, kw_only=True)
class SharedMeshes:
    """Stages on equal meshes that together are all of the cluster, several on each."""

    num_stages: int | None
    """on all meshes together; None: searched"""
    least_meshes: int
    mesh_shape: tuple[int, ...] | None
    """the logical shape of every mesh; None: searched"""
    mesh_rank: int
    equal_layers: bool
    over_hosts: bool

    def cut(self, program: Clustered, costs: LayerCosts, workers: Workers) -> Stages:
        """The cut whose simulated schedule takes the least time. Raises PassError."""
        best: Stages | None = None
        refused: PassError | None = None
        slow: NotFasterError | None = None
        for schedule, submesh in self._possible(program):
            try:
                cut = self._cut(program, costs, workers, schedule, submesh)
            except NotFasterError as error:
                slow = min((slow or error, kept(error)), key=lambda it: it.bound)
                continue
            except PassError as error:
                refused = refused or kept(error)
                continue
            cut = fastest(program, cut)
            meshes, numbers = _placed(program, schedule, cut), range(schedule.num_stages)
            stages = stages_of(program, cut, meshes, numbers, schedule.mesh_of)
            if best is None or stages.seconds < best.seconds:
                best = stages
                within = min(program.within, USELESS * best.seconds)
                program = replace(program, within=within)
        if best is not None:
            return best
        if slow is not None:
            raise fresh(slow)
        assert refused is not None, "something is possible"
        name, chunks = label(program.plan.schedule), chunks_of(program.plan.schedule)
        message = (
            f"{name} has {chunks} stages on each mesh, each with 1/{chunks} of its memory: "
            f"{refused.message}"
        )
        if isinstance(refused, NoRoomError):
            raise NoRoomError(program.function, message, refused.missing) from refused
        raise PassError(program.function, message) from refused

    def _possible(self, program: Clustered) -> list[tuple[WorkLists, Submesh]]:
        """The schedules of all numbers of meshes, with the meshes. Raises PassError."""
        schedule, refused = program.plan.schedule, list[str]()
        chunks, found = chunks_of(schedule), list[tuple[WorkLists, Submesh]]()
        if len(program.cluster.kinds) > 1:
            raise PassError(
                program.function,
                f"{label(schedule)} has {chunks} stages on each of several equal meshes, and the "
                "cluster has hosts of several kinds; plan for hosts of one kind, or use 1f1b",
            )
        for meshes, submesh in self._meshes(program):
            stages = meshes * chunks
            if self.num_stages not in (None, stages):
                continue
            if stages > program.num_layers:
                refused.append(
                    f"{stages} stages need as many layers, and the program has {program.num_layers}"
                )
                continue
            try:
                lists = schedule_on(program, stages)
            except ScheduleError as error:
                refused.append(str(error))
                continue
            found.append((lists, submesh))
        if not found:
            raise PassError(program.function, self._refusal(program, refused))
        # On one mesh there is no pipeline, and stages are of no use.
        several = [it for it in found if it[0].num_meshes > 1]
        if not several and self.least_meshes > 1:
            raise PassError(program.function, "only one mesh is possible, which needs no stages")
        return several or found

    def _refusal(self, program: Clustered, refused: Sequence[str]) -> str:
        """Why there is no number of meshes, and what to do."""
        chunks, name = chunks_of(program.plan.schedule), label(program.plan.schedule)
        what = f"{name} has {chunks} stages on each of several equal meshes"
        if refused:
            reasons = "; ".join(dict.fromkeys(refused))
            return f"{what}: {reasons}; use other numbers, more layers (num-layers), or 1f1b"
        counts = dict.fromkeys(meshes * chunks for meshes, _ in self._meshes(program))
        possible = ", ".join(map(str, sorted(counts)))
        if possible and self.num_stages is not None:
            return f"{what}, so num-stages can be {possible} here, not {self.num_stages}"
        return (
            f"{what}, and the {program.cluster.num_devices} devices cannot be cut into such meshes "
            "of the asked shape; leave mesh-shape out, or use 1f1b"
        )

    def _meshes(self, program: Clustered) -> Iterator[tuple[int, Submesh]]:
        """The numbers of equal meshes that are all of the cluster, with each logical shape."""
        (kind,) = program.cluster.kinds
        for n, m in placement.submeshes(kind.hosts, kind.devices_per_host):
            if kind.hosts % n or kind.devices_per_host % m or (n > 1 and not self.over_hosts):
                continue
            meshes = kind.hosts * kind.devices_per_host // (n * m)
            for shape in logical_shapes(n, m, self.mesh_rank):
                if self.mesh_shape in (None, shape):
                    yield meshes, (n, m, shape)

    def _cut(
        self,
        program: Clustered,
        costs: LayerCosts,
        workers: Workers,
        schedule: WorkLists,
        submesh: Submesh,
    ) -> Cut:
        """The cut of the stage DP for as many devices as there are stages of this size."""
        chunks = chunks_of(program.plan.schedule)
        (kind,) = program.cluster.kinds
        hosts = Group(0, kind.hosts * chunks, kind.devices_per_host)

        def restrict(problem: Problem, _: Sequence[int]) -> Problem:
            return replace(
                problem,
                groups=(hosts,),
                num_stages=schedule.num_stages,
                equal_layers=self.equal_layers,
            )

        def further(
            problem: Problem,
            stages: tuple[Stage, ...],
            candidates: Sequence[Candidate],
            known: Sequence[int],
        ) -> Iterator[tuple[Stage, ...]]:
            def fits(mesh: int, its: tuple[Stage, ...]) -> bool:
                mine = (n for n, number in schedule.mesh_of.items() if number == mesh)
                found = {n: (its[n], candidates[its[n].submesh]) for n in mine}
                return peak_bytes(program, schedule.num_stages, mesh, found) <= memory

            balance = Balance(schedule=schedule, problem=problem, usable=known, fits=fits)
            return iter(()) if self.equal_layers else balance.cuts(stages)

        memory = program.left[0].device.memory
        return Search(
            program=replace(program, reserve=1 - (1 - program.reserve) / chunks),
            costs=costs,
            workers=workers,
            submeshes=[(0, submesh)],
            most_stages=schedule.num_stages,
            restrict=restrict,
            further=further,
        ).run()


def _placed(program: Clustered, schedule: WorkLists, cut: Cut) -> list[MeshAssignment]:
    """The meshes, one after the other."""
    count = schedule.num_meshes
    first = replace(
        cut,
        stages=cut.stages[:count],
        candidates=cut.candidates[:count],
        meshes=cut.meshes[:count],
        kinds=cut.kinds[:count],
    )
    return placed(first, program.cluster)
