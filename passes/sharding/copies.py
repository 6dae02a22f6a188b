"""Memory of copies made for one op, by resharding or in another order, and of partial sums before
they are split.

Resharding writes a copy that lives while its op runs. Its bytes depend on the two nodes whose
layouts differ. A copy that only cuts a value needs no memory if a fusion reads it. Partial sums
also need the whole tensor that is sent and received. A copy that ops of different strategies share
is counted at each of them, but not in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

import numpy as np

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import element_bytes, type_bytes
from alpa.passes.analysis.op_kinds import READS_THROUGH_FUSION
from alpa.passes.cost.reshard import only_cuts
from alpa.passes.sharding.convolution_layouts import argument_of, is_copied
from alpa.passes.sharding.ops import Op
from alpa.passes.sharding.shard_graph import Placed, ShardGraph
from alpa.passes.sharding.spaces import Layouts, Space
from alpa.passes.sharding.strategies import local_elements
from alpa.passes.sharding.sums import unreduced_axes
from alpa.passes.solve.sharding.problem import Usage

_SMALL = 1e-4
"""Smaller copies, as a share of the device's memory, get no row: few exist at a time."""

STORAGE_WEIGHT = 1e-3
"""What a tensor's shard costs, as a part of the time to read it once: enough to break ties, too
little to buy communication."""
_ONE_BY_ONE = frozenset({"stablehlo.while", "stablehlo.optimization_barrier"})
"""Ops with a result for each operand."""


def copies_for_ops(
    graph: ShardGraph, at: Mapping[ir.Value, int], read_until: Mapping[ir.Value, int]
) -> Iterator[Usage]:
    """The memory rows of resharding.

    Args:
        graph: the graph of a mesh.
        at: when an op runs, by its first result.
        read_until: how long an op's operands are read, if its result is a view of them or is fused
            into its readers; those of a loop or a barrier by the result of the same number.
    """
    known: dict[tuple[ir.Value, Layouts], int] = {}
    few = _SMALL * graph.cluster.device.memory
    constraints = ((op, 0, graph.placed[op.results[0]].need) for op in graph.constraints)
    for op, i, need in (*graph.operand_needs, *constraints):
        if op.operand_bytes < few:
            continue
        value = op.operands[i]
        source = graph.placed.get(value)
        if source is None or type_bytes(source.type) < few:
            continue
        time = at.get(op.results[0]) if op.results else None
        if time is None:
            continue
        # Ops of the same strategies, such as the projections of an attention, share a copy.
        start = known.get((value, need.layouts), time)
        stop = read_until.get(op.results[i if op.name in _ONE_BY_ONE else 0], time + 1)
        known[value, need.layouts] = max(start, stop)
        if stop <= start or source.need == need:
            continue
        held = _copied(graph, source, need.layouts, op.name in READS_THROUGH_FUSION)
        if held is not None:
            nodes, held = _deciding(source.node, need.node, held)
            if held.any():
                yield Usage(nodes=nodes, bytes=held, start=start, stop=stop)
    for one in graph.ops:
        time = at.get(one.op.results[0])
        if one.result is not None and time is not None:
            held = _before_scatter(graph, one.space, ir.RankedTensorType(one.op.results[0].type))
            if held.any():
                nodes = (one.node, one.result)
                yield Usage(nodes=nodes, bytes=held, start=time, stop=time + 1)


def copies_for_convolutions(
    graph: ShardGraph, at: Mapping[ir.Value, int], made_here: AbstractSet[ir.Value]
) -> Iterator[Usage]:
    """The memory rows of arguments that GPUs copy, because a convolution reads another order.

    What is resharded arrives in a copy that has a row already, so these are of values that lie as
    they are read.

    Args:
        graph: the graph of a mesh.
        at: when an op runs, by its first result.
        made_here: arguments that other layers of the same stage make, in the order that is read.
    """
    device = graph.cluster.device
    if device.name == "CPU":
        return
    few = _SMALL * device.memory
    for op, i, need in graph.operand_needs:
        argument = None if op.operand_bytes < few else _copied_argument(graph, op, i)
        if argument is None or argument in made_here:
            continue
        source = graph.placed[op.operands[i]]
        there = local_bytes(graph, need.layouts, ir.RankedTensorType(source.type))
        alike = np.array([[one == other for other in need.layouts] for one in source.layouts])
        nodes, held = _deciding(source.node, need.node, np.where(alike, there, 0.0))
        if held.max() >= few:
            time = at[op.results[0]]
            yield Usage(nodes=nodes, bytes=held, start=time, stop=time + 1)


def _copied_argument(graph: ShardGraph, op: Op, operand: int) -> ir.Value | None:
    """The argument that a convolution reads in another order than it has, if it does."""
    view, device = op.view, graph.cluster.device
    if not isinstance(view, stablehlo.ConvolutionOp):
        return None

    def find() -> ir.Value | None:
        return argument_of(view, operand) if is_copied(view, operand, device) else None

    return graph.reader.kept.once(("copied", op, operand), find)


def local_bytes(
    graph: ShardGraph, layouts: Layouts, type_: ir.RankedTensorType, copies: int = 1
) -> np.ndarray:
    """Bytes on a device with its padding, by layout. A partial sum is as large as the sum.

    Equal arrays are one object, because there are many usages.
    """

    def make() -> np.ndarray:
        shape, itemsize = tuple(type_.shape), element_bytes(type_.element_type)
        dims = [layout[: type_.rank] for layout in layouts]
        local = [local_elements(shape, graph.mesh.sizes, layout) for layout in dims]
        return copies * itemsize * np.array(local, dtype=float)

    return graph.cache.once(("bytes", layouts, type_, copies), make)


def charge_storage(graph: ShardGraph, placed: Placed) -> None:
    """Breaks ties between the layouts of a tensor: slices are free, memory should be spared."""
    if isinstance(placed.type, ir.RankedTensorType):
        size = local_bytes(graph, placed.layouts, placed.type)
        seconds = size / graph.cluster.device.memory_bandwidth
        graph.charge((placed.node,), STORAGE_WEIGHT * seconds)


def _deciding(source: int, target: int, held: np.ndarray) -> tuple[tuple[int, ...], np.ndarray]:
    """The nodes on which ``[source, target]`` bytes depend, and the bytes by their strategies."""
    if source == target:
        return (source,), np.diagonal(held)
    if held.shape[0] == 1:
        return (target,), held[0]
    if held.shape[1] == 1:
        return (source,), held[:, 0]
    return (source, target), held


def _copied(graph: ShardGraph, source: Placed, target: Layouts, fused: bool) -> np.ndarray | None:
    """``[source, target]``: bytes that resharding writes; None if they are few."""
    type_ = source.type
    if not isinstance(type_, ir.RankedTensorType) or type_.rank == 0:
        return None

    def make() -> np.ndarray | None:
        before, after = (local_bytes(graph, layouts, type_) for layouts in (source.layouts, target))
        if max(before.max(), after.max()) < _SMALL * graph.cluster.device.memory:
            return None
        held = np.tile(after, (len(before), 1))
        for i, old in enumerate(source.layouts):
            if unreduced_axes(old, type_.rank):
                # The sum is sent, and it arrives, unless that is the result.
                held[i] += np.where(after < before[i], 2 * before[i], before[i])
            for j, new in enumerate(target):
                if old == new or (fused and only_cuts(old, new)):
                    held[i, j] = 0.0
        return held if held.any() else None

    return graph.cache.once(("copy", source.layouts, target, type_, fused), make)


def _before_scatter(graph: ShardGraph, space: Space, type_: ir.RankedTensorType) -> np.ndarray:
    """``[op, result]``: bytes of whole sums before a reduce-scatter; zeros where they are few."""
    assert space.sums is not None
    key, ways, layouts = ("scattered", space.sums, type_), space.sums.ways, space.sums.layouts

    def make() -> np.ndarray:
        held = np.zeros((len(space.strategies), len(layouts)))
        whole = local_bytes(graph, space.results[0], type_)
        for (i, j), way in ways.items():
            if way.scattered:
                held[i, j] = whole[i]
        return held if held.max() >= _SMALL * graph.cluster.device.memory else 0 * held

    return graph.cache.once(key, make)
