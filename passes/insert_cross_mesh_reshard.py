"""Decides how each value crosses from one mesh to another.

The methods (Alpa, section 6; `solve/transfers/cross_mesh.py` compares them):

* `send_recv`: each device of the destination gets its own tile.
* `local_all_gather`: the destination wants replicas. Its devices get a part each, and the fragments
  that read the value gather it.
* `local_reshard`: the value lands as it lies on the source, where that needs fewer messages, and
  the fragments that read it reshard it inside the hosts.
* `broadcast`: the destination wants replicas. One device of a host gets what the host lacks and
  passes it on there.

The pass takes the method that sends the fewest bytes over links between hosts, and of those the one
that takes the least time. A value that is read by anything but fragments, such as a result, cannot
be gathered. The bytes are those of the transfer; a gather is a collective of the fragment that it
stands in. A transfer that has `alpa.reshard` stays as it is.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>
    !y = !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>, sharding=<@mesh_1, [{}, {}]>>
    sdy.mesh @mesh_0 = <["axis0"=2]>
    sdy.mesh @mesh_1 = <["axis0"=2]>
    func.func public @main(%x: !x) -> !y attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                        logical_shape = array<i64: 2>},
                       {name = "mesh_1", hosts = array<i64: 1>, devices = array<i64: 2, 3>,
                        logical_shape = array<i64: 2>}],
        alpa.plan = {cluster = "cpu:2x2", num_micro_batches = 1 : i64, schedule = "gpipe",
                     predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
      %0 = mpmd.transfer %x : (!x) -> !y
      %y = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%0) {alpa.part = "forward"}
          (%a: tensor<8x8xf32>) {
        %1 = stablehlo.tanh %a : tensor<8x8xf32>
        mpmd.return %1 : tensor<8x8xf32>
      } : (!y) -> !y
      return %y : !y
    }

**After**::

    sdy.mesh @mesh_0 = <["axis0"=2]>
    sdy.mesh @mesh_1 = <["axis0"=2]>
    func.func public @main(%x: …) -> … {
      %0 = mpmd.transfer {alpa.reshard = {fast_bytes = 0 : i64, method = "local_all_gather",
                                          slow_bytes = 256 : i64}, alpa.seconds = …} %x
        : (!mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>)
        -> !mpmd.mesh_tensor<"mesh_1", tensor<8x8xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
      %y = mpmd.fragment<mesh="mesh_1", origin=["layer_1"], stage=1> (%0)
          {alpa.part = "forward"} (%a: tensor<8x8xf32>) {
        %2 = sdy.sharding_constraint %a <@mesh_1, [{}, {}]> … : tensor<8x8xf32> // gathers
        %1 = stablehlo.tanh %2 : tensor<8x8xf32>
        mpmd.return %1 : tensor<8x8xf32>
      } : …
      return %y : …
    }

**Requires**: transfers between sharded mesh tensors, as `ilp-shard-annotate` leaves them.

**Ensures**: each transfer has `alpa.reshard` (method, bytes) and `alpa.seconds`. The gathers are
added to the `alpa.seconds` of the fragments. `predicted_step_seconds` of `alpa.plan` is the time of
the simulated schedule (`plan/step_time.py`), unless a fragment has no seconds.

**Options**: none.

**Fails when** a transfer has no shardings. It also fails when a sharding is unreduced, or is over a
part of an axis or an axis that the mesh does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from alpa.dialects import body, ir, mpmd, sdy
from alpa.dialects.attributes import SECONDS, read_float
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import MeshAssignment, Reshard, read_meshes
from alpa.dialects.records import f64
from alpa.dialects.sharding import Sharding, set_op_shardings
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import Layout, ReshardTable, only_cuts
from alpa.passes.plan.annotated import logical_meshes
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.step_time import step_seconds, with_call
from alpa.passes.sharding.layouts import layout_of
from alpa.passes.solve.transfers.cross_mesh import Problem, solve
from alpa.passes.solve.transfers.tiles import TiledMesh, as_on


@dataclass(frozen=True, kw_only=True)
class InsertCrossMeshReshard(Pass):
    """Decides how each value crosses from one mesh to another, and counts the bytes."""

    name: ClassVar[str] = "insert-cross-mesh-reshard"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module, is_checked=self.is_checked)
        plan, cluster = plan_and_any_cluster(function)
        assigned = {mesh.name: mesh for mesh in read_meshes(function)}
        crossings = _Crossings(cluster, assigned, logical_meshes(function))
        for op in list(body(function).operations):
            if isinstance(op, mpmd.TransferOp) and Reshard.read(op) is None:
                crossings.plan(op)
        fragments = [op for op in body(function).operations if isinstance(op, mpmd.FragmentOp)]
        if all(SECONDS in op.attributes for op in fragments):
            program = read_planned(module)
            seconds = with_call(step_seconds(program), program, cluster)
            replace(plan, predicted_step_seconds=seconds).write(function)


@dataclass(frozen=True)
class _Crossings:
    """The transfers of a module."""

    cluster: AnyCluster
    assigned: dict[str, MeshAssignment]
    meshes: dict[str, LogicalMesh]
    tables: dict[tuple[str, int], ReshardTable] = field(
        default_factory=dict[tuple[str, int], ReshardTable]
    )
    """by mesh and rank"""

    def plan(self, op: mpmd.TransferOp) -> None:
        source = MeshTensor.from_type(op.operands[0].type)
        target = MeshTensor.from_type(op.results[0].type)
        if source.sharding is None or target.sharding is None:
            raise PassError(
                op, "a transfer between tensors without shardings; run ilp-shard-annotate before"
            )
        readers = _reading_fragments(op)
        here, there = (
            self._tiled(op, tensor.mesh, sharding)
            for tensor, sharding in ((source, source.sharding), (target, target.sharding))
        )
        shape, itemsize = tuple(target.type.shape), element_bytes(target.type.element_type)
        hosts = self.assigned[source.mesh].hosts, self.assigned[target.mesh].hosts
        problem = Problem(
            shape=shape,
            itemsize=itemsize,
            source=here,
            target=there,
            slow=self.cluster.between(*hosts),
            fast=self.cluster.of(hosts[1]).intra_host,
            readers=len(readers),
            landings=self._landings(here, there, target.mesh, shape, itemsize),
        )
        solution = solve(problem)
        if solution.method in ("local_all_gather", "local_reshard"):
            names = self.meshes[target.mesh].axis_names
            dims = tuple(tuple(names[axis] for axis in axes) for axes in solution.landing)
            _reshard_in(readers, op.results[0], target.sharding)
            landed = replace(target, sharding=Sharding.of(target.sharding.mesh, dims))
            op.results[0].set_type(landed.to_type())
            for fragment in readers:
                seconds = read_float(fragment, SECONDS)
                if seconds is not None:
                    gather = solution.gathers.seconds / len(readers)
                    fragment.attributes[SECONDS] = f64(seconds + gather)
        moved = solution.transfers
        link = problem.slow if moved.slow_bytes else problem.fast
        Reshard(
            method=solution.method,
            slow_bytes=moved.slow_bytes,
            fast_bytes=moved.fast_bytes,
            overlap=link.transfer_overlap,
        ).write(op)
        op.attributes[SECONDS] = f64(moved.seconds)

    def _landings(
        self,
        source: TiledMesh,
        target: TiledMesh,
        name: str,
        shape: tuple[int, ...],
        itemsize: int,
    ) -> tuple[tuple[Layout, float], ...]:
        """The layout in which tiles are those of the source, if the mesh of this name can reshard
        it from there inside its hosts."""
        landing = as_on(source, target)
        if landing is None or only_cuts(landing, target.dims) or only_cuts(target.dims, landing):
            return ()  # Parts of what is wanted are gathered.
        ways = replace(target, dims=landing).ways
        if any(length % count for length, count in zip(shape, ways, strict=True)):
            return ()
        rank = len(shape)
        key = name, rank
        if key not in self.tables:
            self.tables[key] = ReshardTable(self.meshes[name], rank)
        steps = self.tables[key].path(landing, target.dims, shape, itemsize)
        if any(target.crosses_hosts(step.axes) for step in steps):
            return ()
        return ((landing, sum(step.seconds for step in steps)),)

    def _tiled(self, op: mpmd.TransferOp, name: str, sharding: Sharding) -> TiledMesh:
        if sharding.unreduced:
            raise PassError(
                op, "an unreduced value cannot cross: sum it in the fragment that makes it"
            )
        mesh = self.meshes[name]
        layout = layout_of(op, sharding, mesh)
        return TiledMesh.of(self.cluster, self.assigned[name].devices, mesh.sizes, layout)


def _reading_fragments(op: mpmd.TransferOp) -> list[mpmd.FragmentOp]:
    """The fragments that read a transfer's result; none where something else reads it too."""
    readers: list[mpmd.FragmentOp] = []
    for use in op.results[0].uses:
        if not isinstance(use.owner, mpmd.FragmentOp):
            return []
        if use.owner not in readers:
            readers.append(use.owner)
    return readers


def _reshard_in(readers: list[mpmd.FragmentOp], value: ir.Value, wanted: Sharding) -> None:
    """Puts the wanted sharding at the start of each fragment that reads the value."""
    for fragment in readers:
        block = body(fragment)
        for argument, operand in zip(block.arguments, fragment.operands, strict=True):
            if operand != value:
                continue
            with ir.InsertionPoint.at_block_begin(block), fragment.location:
                constraint = sdy.ShardingConstraintOp(argument, wanted.to_attr())
            set_op_shardings(constraint, (wanted,))
            argument.replace_all_uses_except(constraint.result, constraint.operation)
