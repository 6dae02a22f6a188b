"""`stage-mesh-partition`: merges layers into pipeline stages and gives each a device mesh.

Before: `@main` is a list of `mpmd.named_computation`s (see `layer-cluster`).

After:
    sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2]> ...
    func.func public @main(%w: !mpmd.mesh_tensor<"mesh_0", tensor<16x32xf32>> {alpa.input = 0}, ...)
        attributes {topology = #mpmd.topology<...>, alpa.meshes = [...], alpa.plan = {...}} {
      %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0)], stage=0> (%w, %x)
             {alpa.part = "forward"} ...
      %1 = mpmd.transfer %0 : ...  // to the next stage's mesh; the dialect's verifier demands it
      ... }

Stages, meshes, their logical views and their order come from the dynamic program of the paper's
eq. 2-5 (`solve/stage_dp.py`) over costs of sharded layers (`stages/search.py`). An input that
several meshes read is one argument for each; a state that several meshes read is returned to each.

Options:
    cluster: a preset with a shape (`v100-16gb:8x8`) or a TOML file; required.
    num-stages: how many; `auto` lets the cost model choose.
    num-micro-batches: how often forward and backward run before the update does.
    schedule: which micro-batches are in flight; decides what memory admits.
    mesh-rank: logical axes of a mesh inside one host; a mesh over hosts always has two.
    remat: which layers' backward parts compute again what they need of their forward parts
        (`stages/remat.py`): no layer's, every layer's, or, with `auto`, those of stages that are
        possible or faster so within the memory.

Fails when:
    there is no such cluster, or not the mesh that the program's own shardings name
    (`sharding/user_shardings.py`); there are more stages than layers or devices; nothing fits into
    memory; with several micro-batches, the role of an argument or result is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from alpa.dialects import body, func, ir
from alpa.dialects.attributes import (
    Argument,
    MeshAssignment,
    Plan,
    Result,
    Schedule,
    read_arguments,
    read_results,
)
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.analysis.layer_checks import check_stages, origins_of
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import size_text
from alpa.passes.sharding.user_shardings import UserShardings, take_user_shardings
from alpa.passes.solve.schedule import in_flight
from alpa.passes.solve.shard_problem import InfeasibleError
from alpa.passes.stages.class_costs import ClassSolver, class_solver
from alpa.passes.stages.cost import (
    boundary_bytes,
    computation_seconds,
    layer_of,
    part_of,
    transfer_seconds,
)
from alpa.passes.stages.layer_classes import layer_classes
from alpa.passes.stages.merge import FragmentBuilder, Stages
from alpa.passes.stages.remat import Remat, rematerialise, rematerialised
from alpa.passes.stages.search import Option, bounded, costed, remat_bounds, views, with_shares

if TYPE_CHECKING:
    from alpa.passes.solve import stage_dp


@dataclass(frozen=True, kw_only=True)
class StageMeshPartition(Pass):
    """Merges layers into pipeline stages and gives each stage a device mesh."""

    name: ClassVar[str] = "stage-mesh-partition"
    cluster: str = option("", "preset:HOSTSxDEVICES, or a TOML file")
    num_stages: int | Literal["auto"] = option("auto", "pipeline stages")
    num_micro_batches: int = option(1, "forward and backward runs per update")
    schedule: Schedule = option("gpipe", "order of the micro-batches")
    mesh_rank: Literal["1", "2"] = option("2", "logical axes of a mesh inside one host")
    remat: Remat = option("auto", "layers to compute twice instead of keeping what they compute")

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module)
        if not self.cluster:
            raise PassError(
                function,
                "no cluster to plan for; name one with the option cluster, for example "
                "cluster=h100:1x8 (hosts x devices per host) or a TOML file",
            )
        try:
            cluster = Cluster.parse(self.cluster)
        except ClusterError as error:
            raise PassError(function, str(error)) from error
        if self.num_micro_batches < 1:
            raise PassError(function, f"num-micro-batches is {self.num_micro_batches}; at least 1")
        graph = Graph.of(body(function))
        origins = origins_of(graph)
        try:
            arguments, results = read_arguments(function), read_results(function)
        except ValueError as error:
            raise PassError(function, str(error)) from error
        given = take_user_shardings(module, function, results, cluster, remark)
        if self.num_micro_batches > 1:
            _require_roles(function, arguments, results)
        if self.remat == "layer":
            rematerialise(function)
            graph = Graph.of(body(function))
        stages = self._stages(function, graph, origins, cluster, given)
        if stages.rematerialised:
            rematerialise(function, stages.rematerialised)
            graph = Graph.of(body(function))
        shardings = given.arguments if given else {}
        FragmentBuilder(module, function, graph, arguments, results, stages, shardings).rewrite(
            replace(
                self._plan(),
                predicted_step_seconds=stages.seconds,
                predicted_peak_bytes=stages.peak_bytes,
            ),
            cluster,
        )
        check_stages(module, check_input(module))

    def _stages(
        self,
        function: func.FuncOp,
        graph: Graph,
        origins: Sequence[Origin],
        cluster: Cluster,
        given: UserShardings | None,
    ) -> Stages:
        num_layers = 1 + max((n for o in origins if (n := layer_of(o)) is not None), default=0)
        limit = min(num_layers, cluster.num_devices)
        if self.num_stages != "auto" and not 1 <= self.num_stages <= limit:
            raise PassError(
                function,
                f"cannot make {self.num_stages} stages of {num_layers} layer(s) on "
                f"{cluster.num_devices} device(s); num-stages can be at most {limit}",
            )
        num_stages = None if self.num_stages == "auto" else self.num_stages
        if given is not None:
            if num_stages not in (None, 1):
                raise PassError(
                    function,
                    f"the program's shardings over @{given.name} fix one mesh of all devices, so "
                    f"{num_stages} stages are not possible; leave num-stages out, or the shardings",
                )
            return _one_stage(graph, cluster, given, num_layers, self.num_micro_batches)
        plan = self._plan()
        arguments, results = read_arguments(function), read_results(function)
        classes = layer_classes(graph, arguments, results, num_layers, cluster, plan)
        with ExitStack() as stack:
            solver = stack.enter_context(class_solver(classes, cluster, plan))

            @cache
            def remat_solver() -> ClassSolver:
                copy = stack.enter_context(rematerialised(function))
                again = layer_classes(
                    Graph.of(body(copy)), arguments, results, num_layers, cluster, plan
                )
                return stack.enter_context(class_solver(again, cluster, plan))

            search = _Search(
                function=function,
                cluster=cluster,
                plan=plan,
                num_stages=num_stages,
                transfers=transfer_seconds(boundary_bytes(graph, num_layers), cluster),
                mesh_rank=int(self.mesh_rank),
                solver=solver,
                remat_solver=remat_solver if self.remat == "auto" else None,
            )
            return search.run()

    def _plan(self) -> Plan:
        return Plan(
            num_micro_batches=self.num_micro_batches, schedule=self.schedule, cluster=self.cluster
        )


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The stage DP, with the costs of those submeshes that it uses."""

    function: func.FuncOp
    cluster: Cluster
    plan: Plan
    num_stages: int | None
    transfers: np.ndarray
    mesh_rank: int
    solver: ClassSolver
    remat_solver: Callable[[], ClassSolver] | None
    """of the same layers rematerialised; None where that is not to be chosen"""

    def run(self) -> Stages:
        """The best stages and their meshes."""
        from alpa.passes.solve import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        try:
            submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
        except ValueError as error:
            raise PassError(self.function, str(error)) from error
        one = self._one_device(self.solver)
        options = {shape: self._with_remat([bounded(one, *shape)], one) for shape in submeshes}
        options[1, 1] = self._with_remat([one], one)
        again: Option | None = None
        whole = (cluster.hosts, cluster.devices_per_host)
        shapes = views(*whole, self.mesh_rank)
        unsplit = one.max_in_flight(cluster.device.memory)[0, -1]
        if (
            (self.num_stages == 1 or len(one.seconds) == 1)
            and len(shapes) == 1
            and (self.remat_solver is None or unsplit >= self.plan.num_micro_batches)
        ):
            # One stage, on one view of all devices: there is nothing to choose.
            options[whole] = [replace(options[whole][0], shape=shapes[0])]
        while True:
            flat = [option for mine in options.values() for option in mine]
            solution = self._solve(flat)
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
            for submesh, remat in unknown:
                self._cost(options, one, again, submesh, remat)
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
            solution.objective,
            tuple(peaks),
            rematerialised=frozenset(repeated),
        )

    def _cost(
        self,
        options: dict[tuple[int, int], list[Option]],
        one: Option,
        again: Option | None,
        submesh: tuple[int, int],
        remat: float,
    ) -> None:
        """Puts a submesh's costs where bounds were; rematerialised, if they are known without."""
        shapes = views(*submesh, self.mesh_rank)
        known = [o for o in options[submesh] if o.shape is not None and not o.remat]
        if remat and known and self.remat_solver is not None:
            found = costed(self.remat_solver(), *submesh, shapes, remat)
            options[submesh] = known + with_shares(known, found)
        else:
            options[submesh] = self._with_remat(costed(self.solver, *submesh, shapes), one, again)

    def _with_remat(
        self, options: list[Option], one: Option, again: Option | None = None
    ) -> list[Option]:
        if self.remat_solver is None:
            return options
        return options + remat_bounds(options, one, again)

    def _one_device(self, solver: ClassSolver, remat: float = 0.0) -> Option:
        """What the layers cost without sharding. Raises PassError."""
        from alpa.passes.solve.shard_lp import SolverFailedError  # noqa: PLC0415 - start-up time

        try:
            (one,) = costed(solver, 1, 1, [(1,)], remat)
        except (InfeasibleError, TimeoutError, SolverFailedError) as error:
            message = f"the layers cannot be planned on one device: {error}"
            raise PassError(self.function, message) from error
        return one

    def _solve(self, options: Sequence[Option]) -> stage_dp.Solution:
        from alpa.passes.solve import stage_dp  # noqa: PLC0415 - costs start-up time

        memory = self.cluster.device.memory
        try:
            return stage_dp.solve(
                stage_dp.Problem(
                    hosts=self.cluster.hosts,
                    devices_per_host=self.cluster.devices_per_host,
                    submeshes=tuple((o.hosts, o.devices) for o in options),
                    t=np.stack([o.seconds for o in options], axis=2),
                    u=np.stack([o.update for o in options], axis=2),
                    max_in_flight=np.stack([o.max_in_flight(memory) for o in options], axis=2),
                    c=self.transfers,
                    num_micro_batches=self.plan.num_micro_batches,
                    schedule=self.plan.schedule,
                    num_stages=self.num_stages,
                )
            )
        except stage_dp.OutOfMemoryError as error:
            raise PassError(self.function, f"{error}. {self._needs(options)}") from error
        except (stage_dp.InfeasibleError, ValueError) as error:
            problems = {o.problem: f"{o.hosts}x{o.devices}: {o.problem}" for o in options}
            problems.pop("", None)
            reasons = "".join(f"; {problem}" for problem in problems.values())
            raise PassError(self.function, f"{error}{reasons}") from error

    def _needs(self, options: Sequence[Option]) -> str:
        """What does not fit: a layer, else all of them; bounds from below, as far as is known."""
        device, count = self.cluster.device, self.cluster.num_devices
        possible = [option for option in options if not option.problem]
        layers = range(len(self.transfers))
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


def _one_stage(
    graph: Graph, cluster: Cluster, given: UserShardings, num_layers: int, num_micro_batches: int
) -> Stages:
    """All layers on the mesh that the program's shardings name, split evenly as far as is known."""
    devices = cluster.num_devices
    mesh = MeshAssignment(
        name=given.name,
        hosts=tuple(range(cluster.hosts)),
        devices=tuple(range(devices)),
        logical_shape=given.mesh.sizes,
    )
    seconds = sum(
        computation_seconds(op, cluster)
        * (
            1
            if part_of(Origin.from_attr(op.attributes["origin"])) == "update"
            else num_micro_batches
        )
        for op in graph.ops
    )
    names = tuple(name for name, _ in given.mesh.axes)
    return Stages(dict.fromkeys(range(num_layers), 0), [mesh], seconds / devices, (), names)


def _require_roles(
    function: func.FuncOp, arguments: Sequence[Argument], results: Sequence[Result]
) -> None:
    """With several micro-batches every argument and result needs a role (design.md, section 1)."""
    for a, argument in enumerate(arguments):
        if argument.role is None or (argument.role == "batch" and argument.batch_dim is None):
            raise PassError(
                function,
                f"cannot tell whether argument {a} is batch, state, key or constant, which "
                "several micro-batches need; set alpa.role (and alpa.batch_dim) on it",
            )
    for r, result in enumerate(results):
        if result.role is None:
            raise PassError(
                function,
                f"cannot tell how result {r} is made from those of the micro-batches; set "
                'alpa.result = "concat:<dim>", "mean", "sum", "last" or "state:<argument>" on it',
            )
