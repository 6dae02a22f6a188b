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

Fails when:
    there is no such cluster, or not the mesh that the program's own shardings name
    (`sharding/user_shardings.py`); there are more stages than layers or devices; nothing fits into
    memory; with several micro-batches, the role of an argument or result is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from alpa.dialects import body, func, ir, mpmd
from alpa.dialects.attributes import (
    Argument,
    MeshAssignment,
    Plan,
    Result,
    Schedule,
    input_number,
    output_number,
    read_arguments,
    read_results,
    state_pairs,
)
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.sharding.user_shardings import UserShardings, take_user_shardings
from alpa.passes.solve.schedule import in_flight
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
from alpa.passes.stages.search import Option, bounded, costed, views

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
        for op in graph.ops:
            if not isinstance(op, mpmd.NamedComputationOp):
                raise PassError(
                    op, f"{op.name} is outside of any layer; run layer-cluster before this pass"
                )
        try:
            arguments, results = read_arguments(function), read_results(function)
        except ValueError as error:
            raise PassError(function, str(error)) from error
        given = take_user_shardings(
            module, function, state_pairs(arguments, results), cluster, remark
        )
        if self.num_micro_batches > 1:
            _require_roles(function, arguments, results)
        stages = self._stages(function, graph, cluster, given)
        shardings = given.arguments if given else {}
        FragmentBuilder(module, function, graph, arguments, results, stages, shardings).rewrite(
            replace(
                self._plan(),
                predicted_step_seconds=stages.seconds,
                predicted_peak_bytes=stages.peak_bytes,
            ),
            cluster,
        )

    def _stages(
        self,
        function: func.FuncOp,
        graph: Graph,
        cluster: Cluster,
        given: UserShardings | None,
    ) -> Stages:
        origins = [Origin.from_attr(op.attributes["origin"]) for op in graph.ops]
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
        classes = layer_classes(
            graph, read_arguments(function), read_results(function), num_layers, cluster, plan
        )
        with class_solver(classes, cluster, plan) as solver:
            search = _Search(
                function=function,
                cluster=cluster,
                plan=plan,
                num_stages=num_stages,
                transfers=transfer_seconds(boundary_bytes(graph, num_layers), cluster),
                mesh_rank=int(self.mesh_rank),
                solver=solver,
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

    def run(self) -> Stages:
        """The best stages and their meshes."""
        from alpa.passes.solve import placement  # noqa: PLC0415 - costs start-up time

        cluster = self.cluster
        try:
            submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
        except ValueError as error:
            raise PassError(self.function, str(error)) from error
        (one,) = costed(self.solver, 1, 1, [(1,)])
        options = {shape: [bounded(one, *shape)] for shape in submeshes}
        options[1, 1] = [one]
        whole = (cluster.hosts, cluster.devices_per_host)
        shapes = views(*whole, self.mesh_rank)
        if (self.num_stages == 1 or len(one.seconds) == 1) and len(shapes) == 1:
            # One stage, on one view of all devices: there is nothing to choose.
            options[whole] = [replace(options[whole][0], shape=shapes[0])]
        while True:
            flat = [option for mine in options.values() for option in mine]
            solution = self._solve(flat)
            chosen = [flat[stage.submesh] for stage in solution.stages]
            unknown = {(o.hosts, o.devices) for o in chosen if o.shape is None}
            if not unknown:
                break
            for shape in unknown:
                options[shape] = costed(self.solver, *shape, views(*shape, self.mesh_rank))
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
        return Stages(layer_stage, meshes, solution.objective, tuple(peaks))

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
        except (stage_dp.InfeasibleError, ValueError) as error:
            raise PassError(self.function, str(error)) from error


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
                f"cannot tell whether argument {input_number(a, argument)} is batch, state, key or "
                "constant, which several micro-batches need; set alpa.role (and alpa.batch_dim) on "
                "it",
            )
    for r, result in enumerate(results):
        if result.role is None:
            raise PassError(
                function,
                f"cannot tell how result {output_number(r, result)} is made from those of the "
                'micro-batches; set alpa.result = "concat:<dim>", "mean", "sum", "last" or '
                '"state:<argument>" on it',
            )
