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

Fails when:
    there is no such cluster, or not the mesh that the program's own shardings name
    (`sharding/user_shardings.py`); there are more stages than layers or devices; nothing fits into
    memory; no submesh has as many devices as mesh-shape; the cluster has not the meshes that are
    given, or they are given beside num-stages, mesh-shape or equal-layers; a program that trains is
    to be planned for throughput; with several micro-batches, the role of an argument or result is
    unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal

from alpa.dialects import body, func, ir, walk
from alpa.dialects.attributes import (
    AccumulateDtype,
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
from alpa.passes.base import OptionError, Pass, PassError, Remark, option
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.plan.layer_checks import check_layers, check_stages, origins_of
from alpa.passes.sharding.baselines import Intra
from alpa.passes.sharding.user_shardings import UserShardings, take_user_shardings
from alpa.passes.stages.accumulators import widen_accumulators
from alpa.passes.stages.class_problem import class_solver
from alpa.passes.stages.cost import (
    boundary_of,
    computation_seconds,
)
from alpa.passes.stages.costing import Costing
from alpa.passes.stages.given_meshes import GivenMeshes, parse_meshes, take_held
from alpa.passes.stages.layer_classes import LayerClasses, layer_classes
from alpa.passes.stages.merge import FragmentBuilder, Stages
from alpa.passes.stages.remat import Remat, rematerialise, rematerialised
from alpa.passes.stages.search import Search
from alpa.passes.workers import Workers


@dataclass(frozen=True, kw_only=True)
class StageMeshPartition(Pass):
    """Merges layers into pipeline stages and gives each stage a device mesh."""

    name: ClassVar[str] = "stage-mesh-partition"
    cluster: str = option(
        "",
        "a preset with a shape, such as `h100:1x8`, or a TOML file; required",
    )
    num_stages: int | Literal["auto"] = option(
        "auto",
        "how many stages; `auto` takes the fastest",
    )
    num_micro_batches: int = option(
        1,
        "how often forward and backward run before the update does",
    )
    schedule: Schedule = option(
        "gpipe",
        "`gpipe` (all forwards, then all backwards) or `1f1b` (in turn): the order in which a "
        "step runs, and how many micro-batches are in memory at once",
    )
    mesh_rank: Literal["1", "2"] = option(
        "2",
        "logical axes of a mesh inside one host, 1 or 2; a mesh over hosts has two",
    )
    remat: Remat = option(
        "auto",
        "whose backward parts compute their layer's activations again: `none`, every "
        "`layer`'s, or those of stages that are possible or faster so (`auto`)",
    )
    mesh_shape: str = option(
        "auto",
        "the logical shape of every stage's mesh, such as `4x2`; there are as many stages as "
        "such meshes make up the cluster",
    )
    equal_layers: bool = option(
        False,
        "the paper's baseline: stages of equally many layers, as near as possible, on "
        "submeshes of equal size; how many, and how each mesh is seen, is still searched",
    )
    meshes: str = option(
        "auto",
        "the devices and the logical shape of every mesh, in the order of the stages, such as "
        "`0-3:2x2,4-7:4`, instead of a search; a mesh may stay without layers",
    )
    objective: Literal["step", "throughput"] = option(
        "step",
        "what is to be least: the seconds of a step, or, for programs of forwards only, "
        "`throughput`: the seconds of the longest stage",
    )
    intra: Intra = option(
        "auto",
        "what is done inside a mesh, as in `ilp-shard-annotate`: stages are cut by the costs "
        "of that",
    )
    accumulate_dtype: AccumulateDtype = option(
        "f32",
        "the narrowest type in which gradients, and other sums over the micro-batches, are "
        "added up: `f32`, `f64`, or `same`, the type that each has",
    )
    reserve: float = option(
        0.0,
        "the share of each device's memory, from 0 up to 1, that stages are cut to leave "
        "free. Their memory is estimated: where `ilp-shard-annotate` has no room for one, "
        "another cut may have it. `alpa` tries larger ones by itself, with a remark",
    )
    processes: int | Literal["auto"] = option(
        "auto",
        "how many solve large problems beside this one; `auto`: one for each core, and `0` "
        "none. The plan is the same, unless a solver reaches its time limit",
    )

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
        if not 0 <= self.reserve < 1:
            raise PassError(function, f"reserve is {self.reserve:g}; from 0 up to 1, which is all")
        graph = Graph.of(body(function))
        origins = origins_of(graph)
        check_layers(function)
        if self.objective == "throughput":
            _require_forwards(graph.ops, origins)
        try:
            arguments, results = read_arguments(function), read_results(function)
        except ValueError as error:
            raise PassError(function, str(error)) from error
        given = take_user_shardings(
            module, function, state_pairs(arguments, results), cluster, remark
        )
        widened = 0
        if self.num_micro_batches > 1:
            _require_roles(function, arguments, results)
            widened = widen_accumulators(function, results, self._plan())
            graph = Graph.of(body(function))
        if self.remat == "layer":
            rematerialise(function)
            graph = Graph.of(body(function))
        meshes = self._given_meshes(function, cluster, given, remark)
        if not graph.ops:
            raise PassError(
                function, "there is nothing to plan: the results are arguments as they are"
            )
        stages = self._stages(function, graph, origins, cluster, given, meshes, widened)
        if stages.rematerialised:
            rematerialise(function, stages.rematerialised)
            graph = Graph.of(body(function))
        for one in stages.dropped:
            remark(function.location, f"{one.what} is left out of the search: {one.reason}")
        shardings = {(a, 0): sharding for a, sharding in given.arguments.items()} if given else {}
        if meshes is not None:
            held = meshes.held.items()
            shardings = {(a, m): sharding for a, of in held for m, sharding in of.items()}
        FragmentBuilder(module, function, graph, arguments, results, stages, shardings).rewrite(
            replace(
                self._plan(),
                estimated_step_seconds=stages.seconds,
                estimated_step_bound=stages.bound,
                predicted_step_seconds=stages.seconds,
                predicted_peak_bytes=stages.peak_bytes,
                dropped=stages.dropped,
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
        meshes: GivenMeshes | None,
        widened: int,
    ) -> Stages:
        num_layers = 1 + max((n for o in origins if (n := o.layer) is not None), default=0)
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
            if self._forced_shape not in (None, given.mesh.sizes):
                raise PassError(
                    function,
                    f"the program's shardings over @{given.name} fix a mesh of "
                    f"{'x'.join(map(str, given.mesh.sizes))}, so mesh-shape={self.mesh_shape} is "
                    "not possible; leave mesh-shape out, or the shardings",
                )
            return _one_stage(graph, cluster, given, num_layers, self.num_micro_batches)
        plan, memory = self._plan(), cluster.device.memory
        left = replace(cluster.device, memory=int(memory * (1 - self.reserve)))
        cluster = replace(cluster, device=left)
        arguments, results = read_arguments(function), read_results(function)
        with ExitStack() as stack:
            workers = stack.enter_context(Workers(self.processes))
            ops = sum(1 for _ in walk(body(function)))
            workers.prepare("alpa.passes.stages.costing", ops=ops, calls=workers.count)
            classes = layer_classes(graph, arguments, results, num_layers, cluster, plan)

            def costing(classes: LayerClasses) -> Costing:
                solver = stack.enter_context(class_solver(classes, cluster, plan, self.intra))
                return Costing(solver=solver, workers=workers)

            @cache
            def remat_costing() -> Costing:
                copy = stack.enter_context(rematerialised(function))
                again = Graph.of(body(copy))
                return costing(layer_classes(again, arguments, results, num_layers, cluster, plan))

            search = Search(
                function=function,
                cluster=cluster,
                plan=plan,
                num_stages=num_stages,
                boundary=boundary_of(graph, arguments, results, num_layers),
                mesh_rank=int(self.mesh_rank),
                forced_shape=self._forced_shape,
                equal_layers=self.equal_layers,
                objective=self.objective,
                costing=costing(classes),
                remat_costing=remat_costing,
                may_rematerialise=self.remat == "auto",
                widened_bytes=widened,
                given=meshes,
                moved=None if meshes is None else meshes.moved(graph, origins, num_layers),
            )
            return search.run()

    def _given_meshes(
        self,
        function: func.FuncOp,
        cluster: Cluster,
        given: UserShardings | None,
        remark: Remark,
    ) -> GivenMeshes | None:
        """The option `meshes`, None where they are searched. Raises OptionError and PassError."""
        meshes = () if self.meshes == "auto" else parse_meshes(self.meshes, cluster)
        held = take_held(function, meshes)
        if not meshes:
            return None
        if given is not None:
            remark(
                function.location,
                f"the program's shardings over @{given.name} fix its mesh, not the option meshes",
            )
            return None
        others = {
            "num-stages": self.num_stages != "auto",
            "mesh-shape": self.mesh_shape != "auto",
            "equal-layers": self.equal_layers,
        }
        both = next((name for name, is_set in others.items() if is_set), None)
        if both is not None:
            raise PassError(
                function,
                f"meshes and {both} both say which meshes there are; leave one out",
            )
        return GivenMeshes(meshes=meshes, held=held)

    @property
    def _forced_shape(self) -> tuple[int, ...] | None:
        """mesh-shape, None where it is searched. Raises OptionError."""
        if self.mesh_shape == "auto":
            return None
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,3}", self.mesh_shape):
            raise OptionError(
                f"option 'mesh-shape' is '{self.mesh_shape}'; expected auto or the sizes of one to "
                "four axes, such as 4x2"
            )
        return tuple(map(int, self.mesh_shape.split("x")))

    def _plan(self) -> Plan:
        return Plan(
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            cluster=self.cluster,
            accumulate_dtype=self.accumulate_dtype,
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
        * (1 if Origin.from_attr(op.attributes["origin"]).part == "update" else num_micro_batches)
        for op in graph.ops
    )
    names = tuple(name for name, _ in given.mesh.axes)
    return Stages(
        layer_stage=dict.fromkeys(range(num_layers), 0),
        meshes=[mesh],
        seconds=seconds / devices,
        bound=seconds / devices,
        peak_bytes=(),
        axis_names=names,
    )


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


def _require_forwards(ops: Sequence[ir.OpView], origins: Sequence[Origin]) -> None:
    """What runs over and over has no backward part and no update."""
    for op, origin in zip(ops, origins, strict=True):
        if origin.part != "forward":
            raise PassError(
                op,
                "objective=throughput is for programs of forwards only, and this is the "
                f"{origin.part} part {origin.name}; leave the objective out: a training "
                "step's is its seconds",
            )
