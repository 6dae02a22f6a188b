"""Which layers go on which meshes: the stage DP over costs of sharded stages, found as needed.

Each submesh, seen in each logical shape, offers the DP `Option`s: costs as far as they are known,
and else bounds of them (`views.py`). The DP is solved, the costs behind the bounds that its cut
uses are found, and so on until a cut uses none: then no other is better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

from alpa.dialects import func
from alpa.dialects.attributes import MeshAssignment, Plan
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import size_text
from alpa.passes.sharding.baselines import axes_differ
from alpa.passes.solve.schedule import in_flight
from alpa.passes.solve.shard_problem import InfeasibleError, SolverFailedError
from alpa.passes.stages.cost import Boundary
from alpa.passes.stages.costing import Costing
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.options import Option, stage_problem
from alpa.passes.stages.views import OneDevice, View, logical_shapes

if TYPE_CHECKING:
    from alpa.passes.solve import stage_dp

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Search:
    """The stage DP, with the costs of those submeshes that it uses."""

    function: func.FuncOp
    cluster: Cluster
    plan: Plan
    num_stages: int | None
    boundary: Boundary
    mesh_rank: int
    forced_shape: tuple[int, ...] | None
    equal_layers: bool
    objective: Literal["step", "throughput"]
    costing: Costing
    remat_costing: Callable[[], Costing]
    """of the same layers rematerialised"""
    may_rematerialise: bool

    def run(self) -> Stages:
        """The best stages and their meshes."""
        from alpa.passes.solve import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
        if self.forced_shape is not None:
            submeshes = self._submeshes_of_forced_shape(submeshes)
        one = self._planned_on_one_device(
            lambda: OneDevice.of(
                self.costing, self.remat_costing, may_rematerialise=self.may_rematerialise
            )
        )
        views = [
            View.of(one, *submesh, shape)
            for submesh in submeshes
            for shape in self._shapes(*submesh)
        ]
        return self._stages(*self._cut(one, views))

    def _cut(
        self, one: OneDevice, views: list[View]
    ) -> tuple[stage_dp.Problem, stage_dp.Solution, list[Option]]:
        """The best cut, and what each of its stages takes."""
        from alpa.passes.solve import stage_dp  # noqa: PLC0415 - costs start-up time

        only = self._only(one, views)
        if only is not None and not self._may_not_fit(one):
            views, only = [only], None
        while True:
            offers = [(option, view) for view in views for option in view.options()]
            try:
                problem, solution = self._solved(offers)
            except stage_dp.OutOfMemoryError as error:
                if only is None:
                    needs = self._needs([option for option, _ in offers])
                    raise PassError(self.function, f"{error}. {needs}") from error
                # Costs of classes hold a little more than is needed: the sharding program decides.
                views, only = [only], None
                continue
            except ValueError as error:
                raise PassError(self.function, f"{error}{_problems(offers)}") from error
            used = [offers[stage.submesh] for stage in solution.stages]
            unknown = dict.fromkeys(view for option, view in used if option.is_bound)
            if not unknown:
                return problem, solution, [option for option, _ in used]
            if one.again is None and any(option.is_bound and option.remat for option, _ in used):
                # Nearer bounds, now that they matter.
                self._planned_on_one_device(one.rematerialise)
                continue
            # Side by side, with what is about to be asked for.
            alike = (v for v in views if any(v.is_like(other) for other in unknown))
            wanted = list(dict.fromkeys([*unknown, *alike]))
            for view in wanted:
                view.begin()
            if one.again is None and self._memory_may_bind(one):
                # It will be asked for, and there is time now.
                self._planned_on_one_device(one.rematerialise)
            self._begin_next([(o, view) for o, view in offers if view not in wanted], len(wanted))
            for view in wanted:
                view.finish()

    def _begin_next(self, offers: Sequence[tuple[Option, View]], begun: int) -> None:
        """Where a process is idle: what would be asked for if what was begun were of no use."""
        idle = -begun % self.costing.processes if self.costing.processes else 0
        if not idle or not offers:
            return
        try:
            _, solution = self._solved(offers)
        except ValueError:
            return  # There is no cut without what was begun.
        used = [offers[stage.submesh] for stage in solution.stages]
        views = dict.fromkeys(v for o, v in used if o.is_bound and v.hosts * v.devices > 1)
        for view in list(views)[:idle]:
            view.begin()

    def _stages(
        self, problem: stage_dp.Problem, solution: stage_dp.Solution, chosen: Sequence[Option]
    ) -> Stages:
        """Where the stages of a cut are placed."""
        from alpa.passes.solve import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        places = placement.place(
            cluster.hosts, cluster.devices_per_host, [(o.hosts, o.devices) for o in chosen]
        )
        meshes: list[MeshAssignment] = []
        peaks: list[int] = []
        for s, (stage, found) in enumerate(zip(solution.stages, chosen, strict=True)):
            meshes.append(
                MeshAssignment(
                    name=f"mesh_{s}",
                    hosts=tuple(dict.fromkeys(host for host, _ in places[s])),
                    devices=tuple(h * cluster.devices_per_host + d for h, d in places[s]),
                    logical_shape=found.shape,
                )
            )
            plan = self.plan
            batches = in_flight(plan.schedule, plan.num_micro_batches, len(chosen) - s)
            kept = batches * found.activation_bytes[stage.first, stage.last]
            peaks.append(int(found.fixed_bytes[stage.first, stage.last] + kept))
        layer_stage = {
            layer: s
            for s, stage in enumerate(solution.stages)
            for layer in range(stage.first, stage.last + 1)
        }
        repeated = [
            layer
            for stage, found in zip(solution.stages, chosen, strict=True)
            for layer in found.rematerialised(stage.first, stage.last)
        ]
        return Stages(
            layer_stage,
            meshes,
            problem.step_seconds(solution.stages),
            tuple(peaks),
            rematerialised=frozenset(repeated),
        )

    def _planned_on_one_device(self, known: Callable[[], T]) -> T:
        """Raises PassError where the layers cannot be."""
        try:
            return known()
        except (InfeasibleError, TimeoutError, SolverFailedError) as error:
            message = f"the layers cannot be planned on one device: {error}"
            raise PassError(self.function, message) from error

    def _only(self, one: OneDevice, views: Sequence[View]) -> View | None:
        """The view of all devices, where a single stage can take no other, whatever it costs."""
        cluster = self.cluster
        single = self.num_stages == 1 or len(one.option.seconds) == 1
        whole = [
            v for v in views if (v.hosts, v.devices) == (cluster.hosts, cluster.devices_per_host)
        ]
        return replace(whole[0], is_only=True) if single and len(whole) == 1 else None

    def _may_not_fit(self, one: OneDevice) -> bool:
        """Whether rematerialising some layers of a single stage could be needed."""
        fits = one.option.max_in_flight(self.cluster.device.memory)[0, -1]
        return self.may_rematerialise and fits < self.plan.num_micro_batches

    def _memory_may_bind(self, one: OneDevice) -> bool:
        """Whether all layers fill half of all devices with one micro-batch in flight."""
        held = one.option.fixed_bytes[0, -1] + one.option.activation_bytes[0, -1]
        whole = self.cluster.num_devices * self.cluster.device.memory
        return self.may_rematerialise and bool(held >= whole / 2)

    def _shapes(self, hosts: int, devices: int) -> list[tuple[int, ...]]:
        """The logical shapes of a submesh that may be chosen."""
        if self.forced_shape is not None:
            return [self.forced_shape]
        ordered = axes_differ(self.costing.solver.intra)
        return logical_shapes(hosts, devices, self.mesh_rank, ordered=ordered)

    def _submeshes_of_forced_shape(
        self, submeshes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """The submesh with as many devices as the shape. Raises PassError where there is none."""
        assert self.forced_shape is not None
        size = prod(self.forced_shape)
        found = tuple((n, m) for n, m in submeshes if n * m == size)
        if not found:
            raise PassError(
                self.function,
                f"mesh-shape {'x'.join(map(str, self.forced_shape))} has {size} devices; the "
                f"submeshes of {self.cluster.hosts}x{self.cluster.devices_per_host} have "
                f"{', '.join(str(n * m) for n, m in submeshes)}",
            )
        return found

    def _solved(
        self, offers: Sequence[tuple[Option, View]]
    ) -> tuple[stage_dp.Problem, stage_dp.Solution]:
        """The DP's problem over some options, and its solution. Raises its `InfeasibleError`."""
        from alpa.passes.solve import equal_layers, stage_dp  # noqa: PLC0415 - costs start-up time

        problem = stage_problem(
            [option for option, _ in offers],
            self.boundary,
            self.cluster,
            self.plan,
            num_stages=self.num_stages,
            minimise=self.objective,
        )
        solve = equal_layers.solve if self.equal_layers else stage_dp.solve
        return problem, solve(problem)

    def _needs(self, options: Sequence[Option]) -> str:
        """What does not fit: a layer, else all of them; bounds from below, as far as is known."""
        device, count = self.cluster.device, self.cluster.num_devices
        possible = [option for option in options if not option.problem]
        layers = range(len(possible[0].seconds))
        need, layer, option = max(
            min(
                ((o.fixed_bytes + o.activation_bytes)[k, k], k, o.hosts * o.devices)
                for o in possible
            )
            for k in layers
        )
        if need >= device.memory:
            return (
                f"At best layer_{layer} alone holds {size_text(need)} on each of {option} "
                f"device(s), {device.name} has {size_text(device.memory)}"
            )
        fixed, kept = (
            min(o.hosts * o.devices * values(o)[0, -1] for o in possible)
            for values in (lambda o: o.fixed_bytes, lambda o: o.activation_bytes)
        )
        return (
            f"At best all layers hold {size_text(fixed)} and, for each micro-batch in flight, "
            f"{size_text(kept)}; {count} {device.name} have {size_text(count * device.memory)}"
        )


def _problems(offers: Sequence[tuple[Option, View]]) -> str:
    """Why there is no plan on some submeshes."""
    problems = {o.problem: f"; {o.hosts}x{o.devices}: {o.problem}" for o, _ in offers if o.problem}
    return "".join(problems.values())
