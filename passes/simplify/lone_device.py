"""What a program says of the devices that run it, where it is the program of one device.

jax writes a `shard_map` over a mesh of one device as its body: collectives of one device, which
give what they are given, and device numbers, which are 0. Planned for several devices they would
be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from alpa.dialects import filled, ir, sdy, stablehlo
from alpa.dialects.sharding import Mesh
from alpa.dialects.symbols import SYMBOL, named_meshes
from alpa.passes.analysis.graph import replace_op
from alpa.passes.base import PassError

DEVICE_NUMBERS = (stablehlo.PartitionIdOp, stablehlo.ReplicaIdOp)
COLLECTIVES = (
    stablehlo.AllGatherOp,
    stablehlo.AllReduceOp,
    stablehlo.AllToAllOp,
    stablehlo.CollectiveBroadcastOp,
    stablehlo.CollectivePermuteOp,
    stablehlo.ReduceScatterOp,
)


def run_on_one_device(module: ir.Module, ops: Iterable[ir.OpView]) -> None:
    """Rewrites those of the ops that are device numbers and collectives, outside of manual
    computations.

    Raises:
        PassError: a collective is one of several devices.
    """
    for op in ops:
        if not isinstance(op, (*DEVICE_NUMBERS, *COLLECTIVES)) or _is_manual(op):
            continue
        if isinstance(op, DEVICE_NUMBERS):
            replace_op(op, [_zeros(op)])
        else:
            if not _is_alone(module, op):
                raise PassError(
                    op,
                    f"{op.operation.name} of several devices, but the program is that of one: "
                    "collectives stand in sdy.manual_computation, as jax.shard_map writes it",
                )
            receives = not isinstance(op, stablehlo.CollectivePermuteOp) or _pairs(op)
            replace_op(op, list(op.operands) if receives else [_zeros(op)])


def _is_manual(op: ir.OpView) -> bool:
    """Whether an op stands in a manual computation, which is written for several devices."""
    around = op.operation.parent
    while around is not None:
        if isinstance(around.operation.opview, sdy.ManualComputationOp):
            return True
        around = around.operation.parent
    return False


def _is_alone(module: ir.Module, op: ir.OpView) -> bool:
    if isinstance(op, stablehlo.CollectivePermuteOp):
        return all(pair == [0, 0] for pair in _pairs(op))
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseIntElementsAttr):
        return np.array(groups).tolist() == [[0]]
    # jax 0.12 names a mesh, in an attribute that has no Python class.
    meshes = named_meshes(module)
    named = [meshes[quoted or plain] for quoted, plain in SYMBOL.findall(str(groups))]
    return bool(named) and all(Mesh.from_attr(mesh.mesh).size == 1 for mesh in named)


def _pairs(op: ir.OpView) -> list[list[int]]:
    return np.array(ir.DenseIntElementsAttr(op.attributes["source_target_pairs"])).tolist()


def _zeros(op: ir.OpView) -> ir.Value:
    with ir.InsertionPoint(op), op.location:
        return filled(ir.RankedTensorType(op.results[0].type), 0)
