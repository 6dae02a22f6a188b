"""`insert-cross-mesh-reshard`: decides how each value crosses from one mesh to another.

Before: transfers between sharded mesh tensors (see `ilp-shard-annotate`):
    %1 = mpmd.transfer %0 : (!mpmd.mesh_tensor<"mesh_0", ..., sharding=<@mesh_0, [{"axis0"}, {}]>>)
                          -> !mpmd.mesh_tensor<"mesh_1", ..., sharding=<@mesh_1, [{}, {}]>>

After:
    %1 = mpmd.transfer {alpa.reshard = {method = "local_all_gather", slow_bytes = ..., ...}} %0 :
           (...) -> !mpmd.mesh_tensor<"mesh_1", ..., sharding=<@mesh_1, [{"axis0"}, {}]>>
    %2 = mpmd.fragment<mesh="mesh_1", ...> (%1) (%a: tensor<8x32xf32>) {
      %3 = sdy.sharding_constraint %a <@mesh_1, [{}, {}]>   // gathers over the mesh's own links

The methods (Alpa, section 6):
* `send_recv`: each device of the destination gets its own tile.
* `local_all_gather`: the destination wants replicas, so that its devices get a part each and
  the fragments that read it gather. Nothing crosses between the meshes twice.
* `broadcast`: replicas that cannot be gathered, because no dimension divides evenly, the value
  is a scalar, or it is returned as it lands.

Options: none.

Fails when:
    a transfer has no shardings, because `ilp-shard-annotate` was not run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from alpa.dialects import body, ir, mpmd, sdy
from alpa.dialects.attributes import MeshAssignment, Reshard, read_meshes
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import Sharding, set_op_shardings
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.analysis.plan import plan_and_cluster
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.sharding.tiles import TiledMesh, traffic


@dataclass(frozen=True, kw_only=True)
class InsertCrossMeshReshard(Pass):
    """Decides how each value crosses from one mesh to another, and counts the bytes."""

    name: ClassVar[str] = "insert-cross-mesh-reshard"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module)
        _, cluster = plan_and_cluster(function)
        meshes = {mesh.name: mesh for mesh in read_meshes(function)}
        for op in list(body(function).operations):
            if isinstance(op, mpmd.TransferOp):
                _plan_transfer(op, meshes, cluster.devices_per_host)


def _plan_transfer(
    op: mpmd.TransferOp, meshes: dict[str, MeshAssignment], devices_per_host: int
) -> None:
    source = MeshTensor.from_type(op.operands[0].type)
    target = MeshTensor.from_type(op.results[0].type)
    if source.sharding is None or target.sharding is None:
        raise PassError(
            op, "a transfer between tensors without shardings; run ilp-shard-annotate before"
        )
    shape = tuple(target.type.shape)
    here = _tiled(meshes[source.mesh], source.sharding, devices_per_host)
    there = _tiled(meshes[target.mesh], target.sharding, devices_per_host)
    method = "send_recv"
    if there.has_replicas:
        finer = _land_sharded(there, shape)
        readers = _reading_fragments(op)
        if finer is None or readers is None:
            method = "broadcast"
        else:
            method, there = "local_all_gather", finer
            _gather_in(readers, op.results[0], target.sharding)
            landed = replace(target, sharding=_sharding(target.sharding, finer))
            op.results[0].set_type(landed.to_type())
    moved = traffic(here, there, shape, element_bytes(target.type.element_type))
    Reshard(method=method, slow_bytes=moved.slow_bytes, fast_bytes=moved.fast_bytes).write(op)


def _tiled(mesh: MeshAssignment, sharding: Sharding, devices_per_host: int) -> TiledMesh:
    return TiledMesh(
        devices=mesh.devices,
        devices_per_host=devices_per_host,
        sizes=mesh.logical_shape,
        dims=tuple(
            tuple(int(name.removeprefix("axis")) for name in axes) for axes in sharding.axis_names
        ),
    )


def _land_sharded(tiles: TiledMesh, shape: tuple[int, ...]) -> TiledMesh | None:
    """The tiles without replicas: each unused axis on the first dimension that it divides."""
    dims = list(tiles.dims)
    used = {axis for axes in dims for axis in axes}
    for axis, size in enumerate(tiles.sizes):
        if axis in used or size == 1:
            continue
        for d, axes in enumerate(dims):
            ways = size * prod(tiles.sizes[a] for a in axes)
            if shape[d] % ways == 0:
                dims[d] = (*axes, axis)
                break
        else:
            return None
    return replace(tiles, dims=tuple(dims))


def _sharding(old: Sharding, tiles: TiledMesh) -> Sharding:
    return Sharding.of(old.mesh, tuple(tuple(f"axis{a}" for a in axes) for axes in tiles.dims))


def _reading_fragments(op: mpmd.TransferOp) -> list[mpmd.FragmentOp] | None:
    """The fragments that read a transfer's result; None where something else reads it too."""
    readers: list[mpmd.FragmentOp] = []
    for use in op.results[0].uses:
        if not isinstance(use.owner, mpmd.FragmentOp):
            return None
        if use.owner not in readers:
            readers.append(use.owner)
    return readers


def _gather_in(readers: list[mpmd.FragmentOp], value: ir.Value, wanted: Sharding) -> None:
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
