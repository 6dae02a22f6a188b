"""The seconds that adding up the gradients of micro-batches takes.

`export-stages` has each backward computation add its gradients to the sums so far, in place. The
kernel that writes a gradient reads the sum as well; XLA does so for matrix products of the sum's
type, and for the conversion to it. A convolution is a kernel of a library, which does not add:
another one reads gradient and sum, and writes the sum. On ideal devices, adding takes no time.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from alpa.dialects import func, ir, mpmd
from alpa.dialects.attributes import read_part
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.sharding.copies import local_bytes
from alpa.passes.sharding.shard_graph import Placed, ShardGraph


def is_accumulated(gradient: ir.Value, totals: AbstractSet[int]) -> bool:
    """Whether updates read a result of a backward fragment, perhaps through transfers, or it is one
    of the results of `@main` that are totals."""
    for use in gradient.uses:
        user = use.owner
        if isinstance(user, mpmd.FragmentOp) and read_part(user) == "update":
            return True
        if isinstance(user, func.ReturnOp) and use.operand_number in totals:
            return True
        if isinstance(user, mpmd.TransferOp) and is_accumulated(user.results[0], totals):
            return True
    return False


def accumulation_seconds(graph: ShardGraph, placed: Placed, value: ir.Value) -> np.ndarray:
    """Seconds of one micro-batch by the layout of a gradient; `value` is inside its fragment."""
    if graph.cluster.equation is not None:
        return np.zeros(len(placed.layouts))
    device, whole = graph.cluster.device, type_bytes(value.type)
    shares = local_bytes(graph, placed.layouts, ir.RankedTensorType(value.type)) / whole
    maker = value.owner
    alone = not isinstance(maker, ir.Block) and maker.name == "stablehlo.convolution"
    if not alone:
        return device.seconds(0.0, whole, "f32", shares)
    return device.launch + device.seconds(0.0, 3.0 * whole, "f32", shares)
