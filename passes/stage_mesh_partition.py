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

Stages, meshes and their order come from the dynamic program of the paper's eq. 2-5
(`solve/stage_dp.py`) over the costs of `stages/cost.py`. An input that several meshes read
is one argument for each; a state that several meshes read is returned to each.

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
from dataclasses import dataclass
from typing import ClassVar, Literal

from alpa.dialects import body, func, ir, mpmd
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
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.sharding.user_shardings import UserShardings, take_user_shardings
from alpa.passes.stages.cost import (
    layer_costs,
    layer_of,
    stage_tables,
)
from alpa.passes.stages.merge import FragmentBuilder, Stages


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
        given = take_user_shardings(module, function, results, cluster, remark)
        if self.num_micro_batches > 1:
            _require_roles(function, arguments, results)
        state = {a for a, argument in enumerate(arguments) if argument.role == "state"}
        stages = self._stages(function, graph, state, cluster, given)
        shardings = given.arguments if given else {}
        FragmentBuilder(module, function, graph, arguments, results, stages, shardings).rewrite(
            Plan(
                num_micro_batches=self.num_micro_batches,
                schedule=self.schedule,
                predicted_step_seconds=stages.seconds,
                predicted_peak_bytes=stages.peak_bytes,
                cluster=self.cluster,
            ),
            cluster,
        )

    def _stages(
        self,
        function: func.FuncOp,
        graph: Graph,
        state: set[int],
        cluster: Cluster,
        given: UserShardings | None,
    ) -> Stages:
        from alpa.passes.solve import placement, stage_dp  # noqa: PLC0415 - costs start-up time

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
            num_stages = 1
        costs = layer_costs(graph, state, cluster, num_layers)
        try:
            submeshes = placement.submeshes(cluster.hosts, cluster.devices_per_host)
            tables = stage_tables(costs, cluster, submeshes)
            solution = stage_dp.solve(
                stage_dp.Problem(
                    hosts=cluster.hosts,
                    devices_per_host=cluster.devices_per_host,
                    submeshes=submeshes,
                    t=tables.seconds,
                    u=tables.update_seconds,
                    max_in_flight=tables.max_in_flight,
                    c=tables.transfer_seconds,
                    num_micro_batches=self.num_micro_batches,
                    schedule=self.schedule,
                    num_stages=num_stages,
                )
            )
        except (stage_dp.InfeasibleError, ValueError) as error:
            raise PassError(function, str(error)) from error
        shapes = [submeshes[stage.submesh] for stage in solution.stages]
        places = placement.place(cluster.hosts, cluster.devices_per_host, shapes)
        meshes: list[MeshAssignment] = []
        peaks: list[int] = []
        for s, (stage, (hosts, devices)) in enumerate(zip(solution.stages, shapes, strict=True)):
            meshes.append(
                MeshAssignment(
                    name=given.name if given else f"mesh_{s}",
                    hosts=tuple(dict.fromkeys(host for host, _ in places[s])),
                    devices=tuple(h * cluster.devices_per_host + d for h, d in places[s]),
                    logical_shape=given.mesh.sizes
                    if given
                    else self._logical_shape(hosts, devices),
                )
            )
            in_flight = self.num_micro_batches
            if self.schedule == "1f1b":
                in_flight = min(in_flight, len(shapes) - s)
            span = slice(stage.first, stage.last + 1)
            state_bytes = costs.state_bytes[span].sum() + costs.gradient_bytes[span].sum()
            live = in_flight * costs.activation_bytes[span].sum()
            peaks.append(int((state_bytes + live) / (hosts * devices)))
        layer_stage = {
            layer: s
            for s, stage in enumerate(solution.stages)
            for layer in range(stage.first, stage.last + 1)
        }
        names = tuple(name for name, _ in given.mesh.axes) if given else None
        return Stages(layer_stage, meshes, solution.objective, tuple(peaks), names)

    def _logical_shape(self, hosts: int, devices: int) -> tuple[int, ...]:
        if hosts > 1:
            return (hosts, devices)
        if self.mesh_rank == "1" or devices < 4:
            return (devices,)
        return (2, devices // 2)


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
