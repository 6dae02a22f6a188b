"""Memory of resharding: copies made for one op, and partial sums before they are split.

Resharding writes a copy that lives while its op runs. Its bytes depend on the two nodes whose
layouts differ. A copy that only cuts a value needs no memory if a fusion reads it. Partial sums
also need the whole tensor that is sent and received. A copy that ops of different strategies share
is counted at each of them, but not in between.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from alpa.dialects import ir
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.analysis.op_kinds import READS_THROUGH_FUSION
from alpa.passes.cost.reshard import Layout, only_cuts
from alpa.passes.sharding.shard_graph import Need, Placed, ShardGraph
from alpa.passes.sharding.spaces import Layouts, OpNode, Space
from alpa.passes.sharding.sums import unreduced_axes
from alpa.passes.solve.sharding.problem import Usage

_SMALL = 1e-4
"""Smaller copies, as a share of the device's memory, get no row: few exist at a time."""


def copies_for_ops(
    sizes: LocalBytes, at: Mapping[ir.Value, int], read_until: Mapping[ir.Value, int]
) -> Iterator[Usage]:
    """The memory rows of resharding.

    Args:
        sizes: bytes by layout.
        at: when an op runs, by its first result.
        read_until: how long an op's operands are read, if its result is a view of them or is fused
            into its readers.
    """
    graph = sizes.graph
    known: dict[tuple[ir.Value, Layouts], int] = {}
    constraints = ((op, 0, graph.placed[op.results[0]].need) for op in graph.constraints)
    for op, i, need in (*graph.operand_needs, *constraints):
        value = op.operands[i]
        time = at.get(op.results[0]) if op.results else None
        source = graph.placed.get(value)
        if time is None or source is None:
            continue
        # Ops of the same strategies, such as the projections of an attention, share a copy.
        start = known.get((value, need.layouts), time)
        stop = read_until.get(op.results[0], time + 1)
        known[value, need.layouts] = max(start, stop)
        if start < stop:
            fused = op.name in READS_THROUGH_FUSION
            yield from _copy(sizes, source, need, fused, (start, stop))
    for one in graph.ops:
        held, time = sizes.scattered(one), at.get(one.op.results[0])
        if held is not None and one.result is not None and time is not None:
            yield Usage(nodes=(one.node, one.result), bytes=held, start=time, stop=time + 1)


def _copy(
    sizes: LocalBytes, source: Placed, need: Need, fused: bool, span: tuple[int, int]
) -> Iterator[Usage]:
    """The copy of a value in the layouts that a node needs."""
    if source.node == need.node and source.layouts is need.layouts:
        return
    held = sizes.copied(source.layouts, need.layouts, source.type, fused)
    if held is None:
        return
    nodes = (source.node, need.node)
    if source.node == need.node:
        nodes, held = nodes[:1], np.diagonal(held)
    elif held.shape[0] == 1 or held.shape[1] == 1:
        nodes, held = (nodes[1] if held.shape[0] == 1 else nodes[0],), held.reshape(-1)
    if held.any():
        yield Usage(nodes=nodes, bytes=held, start=span[0], stop=span[1])


@dataclass(frozen=True)
class LocalBytes:
    """Bytes on a device by strategy. Equal arrays are one object, because there are many usages."""

    graph: ShardGraph

    def of(self, layouts: Layouts, type_: ir.RankedTensorType, copies: int = 1) -> np.ndarray:
        """Bytes of a tensor by layout. A partial sum is as large as the sum."""

        def make() -> np.ndarray:
            return np.array([copies * self._bytes(layout, type_) for layout in layouts])

        found = self._known(("of", layouts, type_, copies), make)
        assert found is not None
        return found

    def _known(self, key: Hashable, make: Callable[[], np.ndarray | None]) -> np.ndarray | None:
        """Computes an array once for all graphs of a mesh."""
        known = self.graph.cache.bytes
        if key not in known:
            known[key] = make()
        return known[key]

    def _bytes(self, layout: Layout, type_: ir.RankedTensorType) -> float:
        sizes = self.graph.mesh.sizes
        return type_bytes(type_) / prod(sizes[a] for axes in layout[: type_.rank] for a in axes)

    def copied(
        self, source: Layouts, target: Layouts, type_: ir.Type, fused: bool
    ) -> np.ndarray | None:
        """``[source, target]``: bytes that resharding writes; None if they are few."""
        if not isinstance(type_, ir.RankedTensorType) or type_.rank == 0:
            return None
        key = ("copied", source, target, type_, fused)
        return self._known(key, lambda: self._copy(source, target, type_, fused))

    def _copy(
        self, source: Layouts, target: Layouts, type_: ir.RankedTensorType, fused: bool
    ) -> np.ndarray | None:
        before, after = self.of(source, type_), self.of(target, type_)
        if max(before.max(), after.max()) < _SMALL * self.graph.cluster.device.memory:
            return None
        held = np.tile(after, (len(source), 1))
        for i, old in enumerate(source):
            if unreduced_axes(old, type_.rank):
                # The sum is sent, and it arrives, unless that is the result.
                held[i] += np.where(after < before[i], 2 * before[i], before[i])
        held[self._read_in_place(source, target, fused)] = 0.0
        return held if held.any() else None

    def _read_in_place(self, source: Layouts, target: Layouts, fused: bool) -> np.ndarray:
        """``[source, target]``: whether the target layout is read without a copy."""

        def make() -> np.ndarray:
            return np.array(
                [
                    [old == new or (fused and only_cuts(old, new)) for new in target]
                    for old in source
                ]
            )

        found = self._known(("in place", source, target, fused), make)
        assert found is not None
        return found

    def scattered(self, one: OpNode) -> np.ndarray | None:
        """``[op, result]``: bytes of whole sums before a reduce-scatter; None if they are few."""
        space = one.space
        if space.sums is None:
            return None
        type_ = ir.RankedTensorType(one.op.results[0].type)
        key = ("scattered", space.sums, type_)
        return self._known(key, lambda: self._scattered(space, type_))

    def _scattered(self, space: Space, type_: ir.RankedTensorType) -> np.ndarray | None:
        assert space.sums is not None
        held = np.zeros((len(space.strategies), len(space.sums.layouts)))
        (whole,) = (self.of(layouts, type_) for layouts in space.results)
        for (i, j), way in space.sums.ways.items():
            if way.scattered:
                held[i, j] = whole[i]
        return None if held.max() < _SMALL * self.graph.cluster.device.memory else held
