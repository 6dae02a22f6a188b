"""Merges layers into pipeline stages and gives each a device mesh.

Stages, submeshes, their logical mesh shapes and their order come from the dynamic program of the
paper's eq. 2 to 5 (`solve/stages/stage_dp.py`) over costs of sharded layers (`stages/search.py`).
An input that several meshes read becomes one argument for each. A state that several meshes read
is returned to each.

**Before**::

    func.func public @main(%x: tensor<4x8xf32>, %w: tensor<8x8xf32>, %v: tensor<8x8xf32>)
        -> tensor<4x8xf32> {
      %h = mpmd.named_computation<"layer_0"> (%x, %w) (%a: tensor<4x8xf32>, %b: tensor<8x8xf32>) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        mpmd.return %0 : tensor<4x8xf32>
      } : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      %y = mpmd.named_computation<"layer_1"> (%h, %v) (%a: tensor<4x8xf32>, %b: tensor<8x8xf32>) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
        mpmd.return %0 : tensor<4x8xf32>
      } : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      return %y : tensor<4x8xf32>
    }

**After** `stage-mesh-partition{cluster=cpu:1x2 num-stages=2}`::

    sdy.mesh @mesh_0 = <["axis0"=1]>
    sdy.mesh @mesh_1 = <["axis0"=1]>
    func.func public @main(
        %x: !mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>> {alpa.input = 0 : i64},
        %w: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>> {alpa.input = 1 : i64},
        %v: !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>> {alpa.input = 2 : i64})
        -> (!mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>> {alpa.output = 0 : i64})
        attributes {alpa.meshes = …, alpa.plan = {cluster = "cpu:1x2", …}, topology = …} {
      %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w)
          {…, alpa.part = "forward", alpa.seconds = …} …
      %1 = mpmd.transfer %0 : (!mpmd.mesh_tensor<"mesh_0", tensor<4x8xf32>>)
        -> !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>>
      %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%1, %v)
          {…, alpa.part = "forward", alpa.seconds = …} …
      return %2 : !mpmd.mesh_tensor<"mesh_1", tensor<4x8xf32>>
    }

**Requires**: layers as `layer-cluster` makes them.

**Ensures**: `@main` holds fragments on meshes, with a transfer for each value that crosses. It has
`topology`, `alpa.meshes` (hosts, devices, logical shape) and `alpa.plan` (micro-batches, schedule,
predicted seconds and bytes). `verify-layers` accepts it.

**Options**: see the fields.

**Fails when** the cluster does not exist, or is not as large as the mesh of the program's own
shardings (`sharding/user_shardings.py`), once for each stage. It fails when there are more stages
than layers or devices, no cut fits into memory, or no submesh has as many devices as `mesh-shape`.
With `meshes-over-hosts=false` it fails when a mesh over several hosts is given, or there are fewer
stages than hosts. Given `meshes` must be meshes of the cluster and exclude `num-stages`,
`mesh-shape` and `equal-layers`. A schedule with several stages per mesh needs hosts of one kind, a
layer for each stage and the micro-batches that it admits, and excludes `meshes`, `fixed-stages` and
`objective=throughput`. A program that trains cannot be planned for throughput. With several
micro-batches, the role of each argument and result must be known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import ClassVar, Literal, Self

from alpa.dialects import body, func, ir
from alpa.dialects.attributes import read_arguments, read_results, state_pairs
from alpa.dialects.plan import AccumulateDtype, Plan
from alpa.dialects.sharding import Sharding
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.input_checks import check_input, check_unplanned
from alpa.passes.base import Pass, PassError, Remark, errors_at, option
from alpa.passes.cost.cluster import AnyCluster, parse_cluster
from alpa.passes.plan.checks import check_num_micro_batches
from alpa.passes.plan.layer_checks import check_layers, check_stages
from alpa.passes.plan.text import count_text
from alpa.passes.schedules.planned import check_numbers, checked, chunks_of, label, own
from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.sharding.baselines import Intra
from alpa.passes.sharding.user_shardings import UserShardings, take_user_shardings
from alpa.passes.solve.stages.problem import Objective
from alpa.passes.stages.accumulators import widen_accumulators
from alpa.passes.stages.clustered import Clustered, Layers, require_forwards, require_roles
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.costs_folder import FolderError
from alpa.passes.stages.existing_meshes import ExistingMeshes
from alpa.passes.stages.fixed_stages import FixedStage, parse_stages
from alpa.passes.stages.forced_shardings import forced, take_forced
from alpa.passes.stages.given_meshes import parse_meshes, parse_shape, take_held
from alpa.passes.stages.merge import FragmentBuilder, Stages
from alpa.passes.stages.overcommitment import Overcommitment
from alpa.passes.stages.policy import AnyMeshes, Policy, ProgramMesh
from alpa.passes.stages.remat import Remat, rematerialise
from alpa.passes.stages.shared_meshes import SharedMeshes
from alpa.passes.stages.tied_gradients import add_tied_gradients
from alpa.passes.workers import Workers, workers_of


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Layers that can be cut, with what the program said of its arguments."""

    program: Clustered
    held: Mapping[int, Mapping[int, Sharding]]
    """where states lie, by argument and given mesh"""
    forced: Mapping[int, Sharding]
    """shardings of arguments that the user chose"""

    def under(self, schedule: str) -> Self:
        """The same, to be cut for another schedule."""
        plan = replace(self.program.plan, schedule=schedule)
        return replace(self, program=replace(self.program, plan=plan))


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
        "number of stages, on all meshes together; `auto` takes the one with the smallest "
        "estimated step",
    )
    num_micro_batches: int = option(
        1,
        "runs of forward and backward per update",
    )
    schedule: str = option(
        "gpipe",
        "`gpipe` (all forwards, then all backwards), `1f1b` (alternating), another name of "
        "docs/schedules.md, or a file with a table of your own: the order of a step, which decides "
        "how many micro-batches are in memory at once, and how many stages are on each mesh",
    )
    mesh_rank: Literal["1", "2"] = option(
        "2",
        "logical axes of a mesh inside one host, 1 or 2; a mesh over hosts has two",
    )
    remat: Remat = option(
        "auto",
        "layers whose backward parts compute the activations again, block by block: `none`, every "
        "`layer`, or those of stages that fit or are faster with it (`auto`)",
    )
    mesh_shape: str = option(
        "auto",
        "the logical mesh shape of every stage, such as `4x2`; there are as many stages as such "
        "meshes fit into the cluster",
    )
    equal_layers: bool = option(
        False,
        "the paper's baseline: stages of equally many layers, as near as possible, on "
        "submeshes of equal size; their number and logical mesh shapes are searched",
    )
    meshes: str = option(
        "auto",
        "the devices and the logical shape of every mesh, in the order of the stages, such as "
        "`0-3:2x2,4-7:4`, instead of a search; a mesh may get no layers",
    )
    fixed_stages: str = option(
        "",
        "stages that the plan must have, while the others are searched: first and last layer, "
        "hosts x devices, and, if wanted, the logical shape, such as `0-7:1x8,8-11:1x4:2x2`",
    )
    meshes_over_hosts: bool = option(
        True,
        "whether a mesh may span several hosts; `false` where what runs the plan cannot do that, "
        "such as Ray on CPU hosts below jax 0.12. Then each host has stages of its own",
    )
    objective: Objective = option(
        "step",
        "what to minimise: `step`, the seconds of a step, or `throughput`, for programs without a "
        "backward part, the seconds of the longest stage",
    )
    intra: Intra = option(
        "auto",
        "the shardings inside a mesh, as in `ilp-shard-annotate`; stages are cut by their costs",
    )
    accumulate_dtype: AccumulateDtype = option(
        "f32",
        "the narrowest type that adds up gradients and other sums over the micro-batches: `f32`, "
        "`f64`, or `same`, the type of each value",
    )
    reserve: float = option(
        0.0,
        "the share of each device's memory, below 1, that the cut leaves free; from -1 up to 0: "
        "that it may exceed. The memory of stages is estimated: if a stage does not fit in "
        "`ilp-shard-annotate`, another cut may. `alpa` tries larger values, with a remark, and a "
        "slightly negative one",
    )
    processes: int | Literal["auto"] = option(
        "auto",
        "further processes that solve large problems; `auto`: one for each core but one, `0`: "
        "none. The plan does not depend on their number, unless a solver reaches its time limit",
    )

    costs_folder: str = option(
        "",
        "a folder that keeps what the layers cost on meshes for later searches; a remark says how "
        "many were read from it; default: none",
    )

    costs: LayerCosts | None = None
    """of the layers, where the planner keeps them from cut to cut; None: found anew"""
    over: Overcommitment | None = None
    """from the planner; None: stages keep to the memory"""
    workers: Workers | None = None
    """processes of the planner, which are not ended; None: its own"""
    least_meshes: int = 1
    """from the planner; 2: several stages on a single mesh are of no use"""
    within: float = inf
    """from the planner: seconds of a step; if no cut is estimated to take less, none is of use"""
    device: str = ""
    """from the planner: the only device to use, where hosts are of several kinds"""
    equal_meshes: bool = False
    """from the planner: all stages have the same submesh in the same logical shape; hosts, of one
    kind, may stay idle"""
    stages: Stages | None = None
    """found by the planner for these layers and options; None: they are found here"""

    def run(self, module: ir.Module, remark: Remark) -> None:
        self = replace(self, costs=self.costs or self.new_costs())
        layers = self.ready(module, remark)
        stages = self.stages_of(layers, remark) if self.stages is None else self.stages
        self._merge(layers.program, stages, remark)
        check_stages(module)

    def ready(self, module: ir.Module, remark: Remark) -> Ready:
        """Checks the layers and the options, and prepares the layers to be cut.

        Raises:
            PassError: the layers or the options do not allow it.
            OptionError: an option is malformed.
        """
        function = check_input(module, is_checked=self.is_checked)
        check_unplanned(function)
        cluster = self._checked(function)
        with errors_at(function):
            self = self.with_schedule()
        if not self.is_checked:
            check_layers(function)
        if self.objective == "throughput":
            require_forwards(function)
        with errors_at(function):
            arguments, results = read_arguments(function), read_results(function)
        pairs = state_pairs(arguments, results)
        given = take_user_shardings(module, function, pairs, remark)
        plan = Plan(
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            cluster=self.cluster,
            accumulate_dtype=self.accumulate_dtype,
        )
        if self.num_micro_batches > 1:
            require_roles(function, arguments, results)
        add_tied_gradients(function, lambda layer: layer)
        widened = widen_accumulators(function, results, plan)
        self._check_shared(function)
        meshes = () if self.meshes == "auto" else parse_meshes(self.meshes, cluster)
        held = take_held(function, meshes)
        shardings = take_forced(function)
        program = Clustered(
            layers=Layers(function),
            cluster=cluster,
            plan=plan,
            intra=self.intra,
            remat=self.remat,
            reserve=self.reserve,
            widened_bytes=widened,
            given=given,
            within=self.within,
            show=self.show,
        )
        if not program.graph.ops:
            has_results = bool(function.type.results)
            why = "returns its arguments unchanged" if has_results else "has no results"
            raise PassError(function, f"there is nothing to plan: @main {why}")
        return Ready(program=program, held=held, forced=shardings)

    def stages_of(self, layers: Ready, remark: Remark) -> Stages:
        """The best stages, which are only estimated. Raises PassError and OptionError."""
        function = layers.program.function
        self = replace(self, schedule=layers.program.plan.schedule).with_schedule()
        policy = self._policy(layers, remark)
        costs = self.costs or self.new_costs()
        try:
            with workers_of(self.workers, self.processes) as workers:

                def find(program: Clustered) -> Stages:
                    return policy.cut(program, costs, workers)

                over, program = self.over, layers.program
                stages = find(program) if over is None else over.cut(program, find)
        except FolderError as error:
            raise PassError(function, f"costs-folder={self.costs_folder}: {error}") from error
        if costs.read:
            meshes = count_text(costs.read, "mesh", "meshes")
            text = f"the costs of layers on {meshes} were read from {self.costs_folder}"
            remark(function.location, text)
        return forced(stages, layers.forced, function.arguments)

    def _merge(self, program: Clustered, stages: Stages, remark: Remark) -> None:
        """Replaces the layers by fragments on the meshes of their stages."""
        function = program.function
        if stages.rematerialised:
            rematerialise(function, stages.rematerialised)
        is_summed = add_tied_gradients(function, stages.layer_stage.__getitem__)
        for one in stages.dropped:
            remark(function.location, f"{one.what} is left out of the search: {one.reason}")
        plan = replace(
            program.plan,
            estimated_step_seconds=stages.seconds,
            estimated_step_bound=stages.bound,
            predicted_step_seconds=stages.seconds,
            predicted_peak_bytes=stages.peak_bytes,
            dropped=stages.dropped,
        )
        graph = Graph.of(body(function))
        costs = self.costs or self.new_costs()
        known = costs.known() or costs.known(remat=True)
        builder = FragmentBuilder(
            graph,
            program.arguments,
            program.results,
            stages,
            is_timed=self.workers is None,  # A planner shards them, too.
            class_of=None if is_summed or known is None else known.solver.classes.class_of,
        )
        with ir.InsertionPoint(function), function.location:
            builder.declare_meshes()
            builder.build("main", plan, program.cluster)
        function.erase()

    def with_schedule(self) -> Self:
        """The same with its schedule as a plan keeps it, and the number of stages that it fixes.

        Raises:
            ValueError: the schedule is invalid, or for another number of stages or micro-batches.
        """
        schedule = checked(self.schedule)
        mine = own(schedule)
        if mine is None:
            return replace(self, schedule=schedule)
        stages = None if self.num_stages == "auto" else self.num_stages
        if self.meshes != "auto":
            stages = len(parse_meshes(self.meshes, parse_cluster(self.cluster)))
        check_numbers(mine, stages, self.num_micro_batches)
        fixed = self.num_stages if self.meshes != "auto" else mine.num_stages
        return replace(self, schedule=schedule, num_stages=fixed)

    def new_costs(self) -> LayerCosts:
        """None found yet."""
        return LayerCosts(folder=Path(self.costs_folder) if self.costs_folder else None)

    def _checked(self, function: func.FuncOp) -> AnyCluster:
        """The cluster, where it and the numbers are valid. Raises PassError."""
        if not self.cluster:
            raise PassError(
                function,
                "no cluster to plan for; name one with the option cluster, for example "
                "cluster=h100:1x8 (hosts x devices per host) or a TOML file",
            )
        with errors_at(function):
            cluster = parse_cluster(self.cluster)
        check_num_micro_batches(function, self.num_micro_batches)
        if not -1 <= self.reserve < 1:
            raise PassError(
                function, f"reserve is {self.reserve:g}; give a share of at least -1 and below 1"
            )
        return cluster

    def known_stages(self) -> int:
        """How many stages the options fix; 1 where the number is searched, too.

        It is 1 as well where an option is malformed: `run` reads the same ones and says so.
        """
        if self.num_stages != "auto":
            return self.num_stages
        try:
            cluster, shape = parse_cluster(self.cluster), parse_shape(self.mesh_shape)
            if self.meshes != "auto":
                return len(parse_meshes(self.meshes, cluster))
        except ValueError:
            return 1
        chunks = self._chunks()
        return chunks if shape is None else max(1, cluster.num_devices // prod(shape)) * chunks

    def _chunks(self) -> int:
        """The stages on each mesh; 1 where the schedule is invalid, which `run` says."""
        try:
            return chunks_of(checked(self.schedule))
        except ScheduleError:
            return 1

    def fewest_stages(self) -> int:
        """How many stages the options ask for at least; a given mesh may stay without layers."""
        if self.meshes != "auto":
            return 1
        fewest = self.known_stages()
        try:
            cluster = parse_cluster(self.cluster)
        except ValueError:  # `run` says so.
            return fewest
        alike = len(cluster.kinds) == 1
        return max(fewest, cluster.hosts) if alike and not self.meshes_over_hosts else fewest

    def _policy(self, layers: Ready, remark: Remark) -> Policy | SharedMeshes:
        """Which stages and meshes are allowed. Raises OptionError and PassError."""
        program, given = layers.program, layers.program.given
        function, cluster = program.function, program.cluster
        chunks = chunks_of(self.schedule)
        self._check_shared(function)
        meshes = () if self.meshes == "auto" else parse_meshes(self.meshes, cluster)
        if given is not None and meshes and not given.are_stages(meshes):
            text = f"the program's shardings over @{given.name} fix its mesh, not the option meshes"
            remark(function.location, text)
            meshes = ()
        if meshes:
            self._allow_only(
                {
                    "num_stages": ("auto",),
                    "mesh_shape": ("auto",),
                    "equal_layers": (False,),
                    "fixed_stages": ("",),
                },
                function,
                f"meshes={self.meshes} fixes all meshes",
                "meshes",
            )
            return ExistingMeshes(
                objective=self.objective,
                meshes=meshes,
                held=layers.held,
                over_hosts=self.meshes_over_hosts,
            )
        num_stages = None if self.num_stages == "auto" else self.num_stages
        shape = parse_shape(self.mesh_shape)
        if given is not None:
            num_stages, shape = num_stages or chunks, given.mesh.sizes
            self._check_given(given, program, num_stages // chunks)
            if num_stages == 1:
                return ProgramMesh(given=given, over_hosts=self.meshes_over_hosts)
        if chunks > 1:
            return SharedMeshes(
                num_stages=num_stages,
                least_meshes=self.least_meshes,
                mesh_shape=shape,
                mesh_rank=int(self.mesh_rank),
                equal_layers=self.equal_layers,
                over_hosts=self.meshes_over_hosts,
            )
        return AnyMeshes(
            objective=self.objective,
            num_stages=num_stages,
            mesh_shape=shape,
            mesh_rank=int(self.mesh_rank),
            equal_layers=self.equal_layers,
            fixed=parse_stages(self.fixed_stages),
            over_hosts=self.meshes_over_hosts,
            device=self.device,
            equal_meshes=self.equal_meshes,
        )

    def _check_shared(self, function: func.FuncOp) -> None:
        """Raises PassError for an option that a schedule with several stages per mesh excludes."""
        chunks = chunks_of(self.schedule)
        if chunks > 1:
            self._allow_only(
                {"meshes": ("auto",), "fixed_stages": ("",), "objective": ("step",)},
                function,
                f"{label(self.schedule)} has {chunks} stages on each of several equal meshes",
                "the schedule",
            )

    def _check_given(self, given: UserShardings, program: Clustered, num_stages: int) -> None:
        """Checks that the mesh of the program's own shardings can be that of each stage.

        If there is one stage, it may be fixed as what it is: hints of such a plan do so.

        Raises:
            PassError: another option asks for other meshes, or the cluster has another size.
        """
        shape = "x".join(map(str, given.mesh.sizes))
        allowed: dict[str, tuple[object, ...]] = {"mesh_shape": ("auto", shape)}
        cluster = program.cluster
        if num_stages == 1:
            submesh = cluster.hosts, cluster.num_devices // cluster.hosts
            last = program.num_layers - 1
            whole = FixedStage(first=0, last=last, submesh=submesh, shape=given.mesh.sizes)
            fixed = parse_stages(self.fixed_stages)
            if fixed not in ((whole,), (replace(whole, shape=None),)):
                allowed["fixed_stages"] = ("",)
        self._allow_only(
            allowed,
            given.place,
            f"the program's shardings over @{given.name} fix "
            f"{'one mesh' if num_stages == 1 else 'the mesh of each stage, one'} of {shape}",
            "the shardings",
        )
        if num_stages > 0:
            given.check_size(cluster, num_stages)

    def _allow_only(
        self,
        allowed: Mapping[str, tuple[object, ...]],
        place: func.FuncOp | ir.Location,
        fixed: str,
        remedy: str,
    ) -> None:
        """Raises PassError for an option that has none of the values that something else leaves."""
        for field, values in allowed.items():
            value, name = getattr(self, field), field.replace("_", "-")
            if value not in values:
                raise PassError(
                    place,
                    f"{fixed}, so {name}={str(value).lower()} is not possible; leave out {name} "
                    f"or {remedy}",
                )
