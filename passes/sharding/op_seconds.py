"""How long one device takes for an op, before anything is sharded."""

from __future__ import annotations

from alpa.dialects import body, ir, mpmd
from alpa.passes.analysis import op_cost
from alpa.passes.cost.cluster import Cluster


def op_seconds(op: ir.OpView, cluster: Cluster) -> float:
    """The larger of FLOPs over the dtype's peak and bytes over memory bandwidth, in seconds."""
    if isinstance(op, mpmd.ReturnOp):
        return 0.0
    return cluster.device.seconds(op_cost.flops(op), op_cost.memory_bytes(op), _dtype(op))


def computation_seconds(op: ir.OpView, cluster: Cluster) -> float:
    """The seconds of all ops of a computation, one after the other."""
    return sum(op_seconds(inner, cluster) for inner in body(op).operations)


def _dtype(op: ir.OpView) -> str:
    """The element type that an op computes in, as the cluster file names it (`f32`, `i8`)."""
    for value in [*op.operands, *op.results]:
        if isinstance(value.type, ir.RankedTensorType):
            return str(value.type.element_type)
    return "f32"
