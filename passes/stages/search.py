"""Which layers go on which meshes: the stage DP over costs of sharded stages, found as needed.

A submesh offers the DP `Option`s (`options.py`). Solving for them takes seconds, so a submesh is at
first assumed to split all work and memory evenly and to send nothing: no sharding does better. The
DP is solved, the submeshes that its cut uses are costed, and so on until a cut uses none that is
not: then no other is better.

Rematerialisation is found in the same way: a submesh whose costs are known is at first assumed to
rematerialise for nothing, and to keep nothing for the backward part (or an even split, once that is
known). Where all that is fast fits into memory, no cut uses this assumption, and nothing is costed
a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal

from alpa.dialects import func
from alpa.dialects.attributes import MeshAssignment, Plan
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import size_text
from alpa.passes.sharding.baselines import axes_differ
from alpa.passes.solve.schedule import in_flight
from alpa.passes.solve.shard_problem import InfeasibleError, SolverFailedError
from alpa.passes.stages.class_costs import ClassSolver
from alpa.passes.stages.cost import Boundary
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.options import (
    Option,
    begin_costing,
    bounded,
    costed,
    remat_bounds,
    stage_problem,
    views,
    with_shares,
)

if TYPE_CHECKING:
    from alpa.passes.solve import stage_dp


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
    solver: ClassSolver
    remat_solver: Callable[[], ClassSolver] | None
    """of the same layers rematerialised; None where that is not to be chosen"""

    def run(self) -> Stages:
        """The best stages and their meshes."""
        from alpa.passes.solve import placement, stage_dp  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
        if self.forced_shape is not None:
            submeshes = self._submeshes_of_forced_shape(submeshes)
        one = self._one_device(self.solver)
        options = {shape: self._with_remat([bounded(one, *shape)], one) for shape in submeshes}
        if (1, 1) in options:
            alone = replace(one, shape=self.forced_shape or (1,))
            options[1, 1] = self._with_remat([alone], one)
        again: Option | None = None
        whole = (cluster.hosts, cluster.devices_per_host)
        undecided: Option | None = None
        if whole in options and (self.num_stages == 1 or len(one.seconds) == 1):
            shapes = self._views(*whole)
            if len(shapes) == 1:
                # One stage, on one view of all devices: at most remat is to be chosen.
                undecided = replace(options[whole][0], shape=shapes[0])
        if undecided is not None and (
            self.remat_solver is None
            or one.max_in_flight(cluster.device.memory)[0, -1] >= self.plan.num_micro_batches
        ):
            options[whole] = [undecided]
        while True:
            flat = [option for mine in options.values() for option in mine]
            problem = stage_problem(
                flat,
                self.boundary,
                cluster,
                self.plan,
                num_stages=self.num_stages,
                minimise=self.objective,
            )
            try:
                solution = self._solve(problem, flat)
            except stage_dp.OutOfMemoryError as error:
                if undecided is None:
                    raise PassError(self.function, f"{error}. {self._needs(flat)}") from error
                # Costs of classes hold a little more than is needed: the sharding program decides.
                options, undecided = {whole: [undecided]}, None
                continue
            chosen = [flat[stage.submesh] for stage in solution.stages]
            unknown = {((o.hosts, o.devices), o.remat) for o in chosen if o.shape is None}
            if not unknown:
                break
            if again is None and self.remat_solver is not None and any(r for _, r in unknown):
                # Nearer bounds, now that they matter.
                again = self._one_device(self.remat_solver(), remat=1.0)
                options = {
                    submesh: self._with_remat([o for o in mine if not o.remat], one, again)
                    for submesh, mine in options.items()
                }
                continue
            # One submesh is posed while those before it are being solved.
            posed = {
                submesh: self._begin(options[submesh], submesh, one, again)
                for submesh in sorted({submesh for submesh, _ in unknown})
            }
            options |= {submesh: finish() for submesh, finish in posed.items()}
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
                    logical_shape=found.shape or (),
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

    def _begin(
        self,
        options: Sequence[Option],
        submesh: tuple[int, int],
        one: Option,
        again: Option | None,
    ) -> Callable[[], list[Option]]:
        """Poses the problems of a submesh: rematerialised, if its costs without are known.

        What is returned waits for their solutions, and gives the submesh's new options.
        """
        shapes = self._views(*submesh)
        known = [o for o in options if o.shape is not None and not o.remat]
        if known and self.remat_solver is not None:
            found = begin_costing(self.remat_solver(), *submesh, shapes, remat=1.0)
            return lambda: known + with_shares(known, found())
        found = begin_costing(self.solver, *submesh, shapes)
        return lambda: self._with_remat(found(), one, again)

    def _with_remat(
        self, options: list[Option], one: Option, again: Option | None = None
    ) -> list[Option]:
        if self.remat_solver is None:
            return options
        return options + remat_bounds(options, one, again)

    def _one_device(self, solver: ClassSolver, remat: float = 0.0) -> Option:
        """What the layers cost without sharding. Raises PassError."""
        try:
            (one,) = costed(solver, 1, 1, [(1,)], remat)
        except (InfeasibleError, TimeoutError, SolverFailedError) as error:
            message = f"the layers cannot be planned on one device: {error}"
            raise PassError(self.function, message) from error
        return one

    def _views(self, hosts: int, devices: int) -> list[tuple[int, ...]]:
        """The logical shapes of a submesh that may be chosen."""
        if self.forced_shape is not None:
            return [self.forced_shape]
        return views(hosts, devices, self.mesh_rank, ordered=axes_differ(self.solver.intra))

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

    def _solve(self, problem: stage_dp.Problem, options: Sequence[Option]) -> stage_dp.Solution:
        from alpa.passes.solve import equal_layers, stage_dp  # noqa: PLC0415 - costs start-up time

        solve = equal_layers.solve if self.equal_layers else stage_dp.solve
        try:
            return solve(problem)
        except stage_dp.OutOfMemoryError:
            raise
        except (stage_dp.InfeasibleError, ValueError) as error:
            problems = {o.problem: f"{o.hosts}x{o.devices}: {o.problem}" for o in options}
            problems.pop("", None)
            reasons = "".join(f"; {problem}" for problem in problems.values())
            raise PassError(self.function, f"{error}{reasons}") from error

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
