"""Which layers go on which meshes: the stage DP over costs of sharded stages, found as needed.

Each submesh, seen in each logical shape, offers the DP `Option`s: costs if they are known, and
otherwise bounds of them (`views.py`). The DP is solved, the costs behind the bounds that its cut
uses are found, and so on until a cut uses known costs only.

What is proven: the DP's cut has the least T of all cuts, by these costs. The first solution, where
only one device's costs are known, is a bound: no cut has a smaller T, whatever its shardings are,
if transfers between stages take what is estimated (`cost.Boundary`).

What is estimated: the costs of a stage are those of shardings that fit all layers of a class
(`class_problem.py`). Such shardings exist, but a stage may have better ones, above all at its ends.
How much better is known only for the stages of the final plan, from `ilp-shard-annotate`; the
bound limits it for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from alpa.dialects import func
from alpa.dialects.attributes import Dropped, MeshAssignment, Plan
from alpa.passes.base import NoRoomError, PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import size_text
from alpa.passes.sharding.baselines import axes_differ
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.solve.stages.schedule import in_flight
from alpa.passes.stages.cost import Boundary
from alpa.passes.stages.costing import Costing
from alpa.passes.stages.given_meshes import GivenMeshes
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.options import Option, stage_problem
from alpa.passes.stages.views import OneDevice, View, logical_shapes

if TYPE_CHECKING:
    from alpa.passes.solve.stages import stage_dp

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Stages on submeshes, which are numbers of options, and T in seconds.

    `meshes` are the numbers of the given meshes that they are on, where there are such.
    """

    stages: tuple[stage_dp.Stage, ...]
    seconds: float
    meshes: tuple[int, ...] | None = None


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
    widened_bytes: int = 0
    """that all sums over the micro-batches together hold more than in the gradients' own types"""
    given: GivenMeshes | None = None
    """where the meshes are not searched"""
    moved: np.ndarray | None = None
    """of the given meshes, as `GivenMeshes.moved` has it"""

    def run(self) -> Stages:
        """The best stages and their meshes."""
        from alpa.passes.solve.stages import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
        if self.given is not None:
            submeshes = tuple(dict.fromkeys(self.given.submeshes))
        elif self.forced_shape is not None:
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
        stages = self._stages(*self._cut(one, views))
        return replace(stages, dropped=tuple(_dropped(views)))

    def _cut(self, one: OneDevice, views: list[View]) -> tuple[_Cut, list[Option], float]:
        """The best cut, what each of its stages takes, and a bound of its seconds."""
        from alpa.passes.solve.stages import stage_dp  # noqa: PLC0415 - costs start-up time

        bound: float | None = None
        only = self._only(one, views)
        if only is not None and not self._may_not_fit(one):
            views, only = [only], None
        while True:
            offers = [(option, view) for view in views for option in view.options()]
            try:
                cut = self._solved(offers)
            except stage_dp.NoCutInMemoryError as error:
                if only is None:
                    needs = self._needs([option for option, _ in offers]) + self._narrower()
                    raise NoRoomError(self.function, f"{error}. {needs}", missing=0.0) from error
                # Costs of classes hold a little more than is needed: the sharding program decides.
                views, only = [only], None
                continue
            except stage_dp.NoCutError as error:
                raise PassError(self.function, f"{error}{_problems(offers)}") from error
            bound = cut.seconds if bound is None else bound
            used = [offers[stage.submesh] for stage in cut.stages]
            unknown = dict.fromkeys(view for option, view in used if option.is_bound)
            if not unknown:
                return cut, [option for option, _ in used], bound
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
        from alpa.passes.solve.stages import stage_dp  # noqa: PLC0415 - costs start-up time

        idle = -begun % self.costing.processes if self.costing.processes else 0
        if not idle or not offers:
            return
        try:
            cut = self._solved(offers)
        except stage_dp.NoCutError:
            return  # There is no cut without what was begun.
        used = [offers[stage.submesh] for stage in cut.stages]
        views = dict.fromkeys(v for o, v in used if o.is_bound and v.hosts * v.devices > 1)
        for view in list(views)[:idle]:
            view.begin()

    def _stages(self, cut: _Cut, chosen: Sequence[Option], bound: float) -> Stages:
        """Where the stages of a cut are placed."""
        numbers = cut.meshes
        if self.given is None or numbers is None:
            meshes, numbers = self._placed(chosen), tuple(range(len(chosen)))
        else:
            meshes = list(self.given.meshes)
        plan, peaks = self.plan, [0] * len(meshes)
        for q, stage, found in zip(numbers, cut.stages, chosen, strict=True):
            batches = in_flight(plan.schedule, plan.num_micro_batches, len(meshes) - q)
            kept = batches * found.activation_bytes[stage.first, stage.last]
            peaks[q] = int(found.fixed_bytes[stage.first, stage.last] + kept)
        layer_stage = {
            layer: q
            for q, stage in zip(numbers, cut.stages, strict=True)
            for layer in range(stage.first, stage.last + 1)
        }
        repeated = [
            layer
            for stage, found in zip(cut.stages, chosen, strict=True)
            for layer in found.rematerialised(stage.first, stage.last)
        ]
        return Stages(
            layer_stage=layer_stage,
            meshes=meshes,
            seconds=cut.seconds,
            bound=min(bound, cut.seconds) if self._least_step else 0.0,
            peak_bytes=tuple(peaks),
            rematerialised=frozenset(repeated),
        )

    @property
    def _least_step(self) -> bool:
        """Whether the cut is that of the least T."""
        return self.objective == "step" and self.given is None

    def _placed(self, chosen: Sequence[Option]) -> list[MeshAssignment]:
        """The meshes of stages in their order."""
        from alpa.passes.solve.stages import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        places = placement.place(
            cluster.hosts, cluster.devices_per_host, [(o.hosts, o.devices) for o in chosen]
        )
        return [
            MeshAssignment(
                name=f"mesh_{s}",
                hosts=tuple(dict.fromkeys(host for host, _ in place)),
                devices=tuple(h * cluster.devices_per_host + d for h, d in place),
                logical_shape=found.shape,
            )
            for s, (place, found) in enumerate(zip(places, chosen, strict=True))
        ]

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
        meshes = 0 if self.given is None else len(self.given.meshes)
        single = self.num_stages == 1 or len(one.option.seconds) == 1 or meshes == 1
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
        if self.given is not None:
            pairs = zip(self.given.submeshes, self.given.meshes, strict=True)
            shapes = [it.logical_shape for submesh, it in pairs if submesh == (hosts, devices)]
            return list(dict.fromkeys(shapes))
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

    def _solved(self, offers: Sequence[tuple[Option, View]]) -> _Cut:
        """The best cut over some options. Raises `NoCutError`."""
        from alpa.passes.solve.stages import equal_layers, stage_dp  # noqa: PLC0415 - costs start-up time

        problem = stage_problem(
            [option for option, _ in offers],
            self.boundary,
            self.cluster,
            self.plan,
            num_stages=self.num_stages,
            minimise=self.objective,
        )
        if self.given is not None:
            return self._solved_on_given(problem, [option for option, _ in offers], self.given)
        solve = equal_layers.solve if self.equal_layers else stage_dp.solve
        stages = solve(problem).stages
        return _Cut(stages=stages, seconds=problem.step_seconds(stages))

    def _solved_on_given(
        self, costs: stage_dp.Problem, options: Sequence[Option], given: GivenMeshes
    ) -> _Cut:
        from alpa.passes.solve.stages import fixed_meshes  # noqa: PLC0415 - costs start-up time

        assert self.moved is not None, "given meshes come with what they move"
        each = self.cluster.devices_per_host
        meshes = tuple(
            fixed_meshes.Mesh(
                submeshes=tuple(
                    number
                    for number, option in enumerate(options)
                    if (option.hosts, option.devices) == submesh
                    and option.shape == mesh.logical_shape
                ),
                before_is_far=mesh.devices[0] % each == 0,
                behind_is_far=(mesh.devices[-1] + 1) % each == 0,
            )
            for submesh, mesh in zip(given.submeshes, given.meshes, strict=True)
        )
        problem = fixed_meshes.Problem(costs=costs, meshes=meshes, moved=self.moved)
        found = fixed_meshes.solve(problem)
        return _Cut(stages=found.stages, meshes=found.meshes, seconds=found.step_seconds)

    def _narrower(self) -> str:
        """What narrower sums over the micro-batches would spare."""
        if not self.widened_bytes:
            return ""
        return (
            f". Adding up gradients in {self.plan.accumulate_dtype} takes "
            f"{size_text(self.widened_bytes)} more in all than in their own types, which "
            "accumulate-dtype=same keeps"
        )

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


def _dropped(views: Sequence[View]) -> Iterator[Dropped]:
    """Views whose costs no solver found: a cut that uses them may be better."""
    for view in views:
        shape = "x".join(map(str, view.shape))
        for reason in view.dropped:
            what = f"a submesh of {view.hosts}x{view.devices} devices seen as {shape}"
            yield Dropped(what=what, reason=reason)


def _problems(offers: Sequence[tuple[Option, View]]) -> str:
    """Why there is no plan on some submeshes."""
    problems = {o.problem: f"; {o.hosts}x{o.devices}: {o.problem}" for o, _ in offers if o.problem}
    return "".join(problems.values())
