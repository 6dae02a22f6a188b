"""The paper's baselines (section 8.2) as restrictions of the same strategy space.

Each baseline forbids strategies. The rest is costed, checked against memory and solved like the
whole space, so that all plans are compared by one model and can be executed.

* none: every device does everything
* data-parallel: the batch is split over all devices, states are replicated, gradients all-reduced
* zero2: data-parallel, but optimizer states are sharded and gradients reduce-scattered into them
* zero3: zero2, and parameters are sharded too: gathered where they are used
* heuristic: every argument is split along its largest dimension. Each op, in program order, takes
  the cheapest strategy given those before it, like GSPMD's propagation from such annotations.
* megatron: the first axis splits the batch, the others only tensors. The search takes the best of
  these layouts. States are replicated along the first axis.
* megatron-zero2: megatron, where optimizer states may be split along the first axis, too, and
  gradients are then reduce-scattered into them. Alpa's authors ran GPT on one mesh so.

If the batch does not divide evenly over all axes, it is split over the first ones that divide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import numpy as np

from alpa.dialects import ir
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import ShardingRule
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.shard_graph import Placed, ShardGraph
from alpa.passes.sharding.strategies import Strategy, strategy_of

Intra = Literal[
    "auto",
    "tapas",
    "data-parallel",
    "zero2",
    "zero3",
    "heuristic",
    "megatron",
    "megatron-zero2",
    "none",
]
StateKind = Literal["parameter", "optimizer"]
_TENSOR_PARALLEL = ("megatron", "megatron-zero2")
_SPLIT_UPDATES = ("zero2", "zero3", "megatron-zero2")
"""Their updates run on parts of the states, and gradients are reduce-scattered."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The arguments of a mesh, the kinds of its states, and the values of its updates."""

    states: dict[ir.Value, StateKind]
    arguments: tuple[ir.Value, ...]
    updates: frozenset[ir.Value]
    """values that only the update part makes"""


def is_baseline(intra: Intra) -> bool:
    """Whether the strategies are restricted; other values name ways to search all of them."""
    return intra not in ("auto", "tapas")


def axes_differ(intra: Intra) -> bool:
    """Whether a baseline uses the axes of a mesh differently, so that their order matters."""
    return intra in _TENSOR_PARALLEL


def restrict(graph: ShardGraph, intra: Intra, batch: BatchDims, tensors: Tensors) -> None:
    """Forbids the strategies outside of a baseline, by infinite costs."""
    if intra == "heuristic":
        _propagate(graph, tensors)
        return
    space = _Restriction(graph, intra, batch, tensors)
    for value, placed in graph.tensors.items():
        kept = [i for i, layout in enumerate(placed.layouts) if space.fits(value, layout, placed)]
        graph.allow_only(placed.node, kept or [0])
    for one in graph.ops:
        graph.allow_variants(one, partial(space.admits, one.op.view))


@dataclass(frozen=True)
class _Restriction:
    graph: ShardGraph
    intra: Intra
    batch: BatchDims
    tensors: Tensors

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that split the batch."""
        sizes = self.graph.mesh.sizes
        wanted = [a for a, size in enumerate(sizes) if size > 1]
        if self.intra == "none":
            return ()
        if self.intra in _TENSOR_PARALLEL:
            wanted = [a for a in wanted if a == 0 and len(sizes) > 1]
        axes: tuple[int, ...] = ()
        for axis in wanted:
            ways = prod(sizes[a] for a in (*axes, axis))
            if self.batch.sizes and all(size % ways == 0 for size in self.batch.sizes):
                axes = (*axes, axis)
        return axes

    def fits(self, value: ir.Value, layout: Layout, placed: Placed) -> bool:
        """Whether a tensor's node may take a layout."""
        dim = self.batch.of.get(value)
        if dim is None:
            return self._state_fits(value, layout, placed)
        others = [axis for d, on in enumerate(layout) for axis in on if d != dim]
        return layout[dim] == self.axes and (not others or self.intra in _TENSOR_PARALLEL)

    def _state_fits(self, value: ir.Value, layout: Layout, placed: Placed) -> bool:
        used = {axis for on in layout for axis in on}
        kind = self.tensors.states.get(value)
        free = value in self.tensors.updates and self.intra in _SPLIT_UPDATES
        if self.intra in _TENSOR_PARALLEL:
            free = free or (kind == "optimizer" and self.intra in _SPLIT_UPDATES)
            return free or not used & set(self.axes)
        sharded = kind == "optimizer" and self.intra in ("zero2", "zero3")
        sharded = sharded or (kind == "parameter" and self.intra == "zero3")
        if sharded:
            return len(used) == max(sum(map(len, other)) for other in placed.layouts)
        return free or not used

    def admits(self, op: ir.OpView, strategy: Strategy) -> bool:
        """Whether an op may take a strategy."""
        late = all(result in self.tensors.updates for result in op.results)
        if late and self.intra in _SPLIT_UPDATES:
            return True
        rule = self.graph.reader.rule_of(op)
        assert rule is not None, "ops without a rule have no node"
        if strategy.scattered and self.intra not in _SPLIT_UPDATES:
            return False
        if self.intra in _TENSOR_PARALLEL:
            return self._is_tensor_parallel(op, rule, strategy)
        wanted = self._data_parallel(op, rule)
        return (strategy.operands, strategy.computed) == (wanted.operands, wanted.results)

    def _data_parallel(self, op: ir.OpView, rule: ShardingRule) -> Strategy:
        batch = self.batch.factors(op, rule)
        sizes = self.graph.mesh.sizes
        on = tuple(self.axes if f in batch[:1] else () for f in range(len(rule.factor_sizes)))
        whole = strategy_of(rule, sizes, ((),) * len(rule.factor_sizes))
        assert whole is not None, "replicated divides evenly"
        fixed = rule.need_replication | rule.permutation
        split = None if fixed & set(batch[:1]) else strategy_of(rule, sizes, on)
        return whole if split is None or split.padded else split

    def _is_tensor_parallel(self, op: ir.OpView, rule: ShardingRule, strategy: Strategy) -> bool:
        """Whether axis 0 is where data parallelism has it, and the others are not on the batch."""
        ours = set(self.axes)
        wanted = self._data_parallel(op, rule)
        batch = self.batch.factors(op, rule)

        def kept(layouts: Sequence[Layout]) -> list[Layout]:
            return [tuple(tuple(a for a in on if a in ours) for on in layout) for layout in layouts]

        others_on_batch = any(
            a not in ours
            for layout, mapping in zip(strategy.operands, rule.operands, strict=True)
            for on, factors in zip(layout, mapping, strict=True)
            for a in on
            if factors[:1] and factors[0] in batch and len(factors) == 1
        )
        return (
            not others_on_batch
            and kept(strategy.operands) == list(wanted.operands)
            and kept(strategy.computed) == list(wanted.results)
        )


def _propagate(graph: ShardGraph, tensors: Tensors) -> None:
    """Splits arguments along their largest dimensions, then fixes node after node.

    Each node, in program order, takes the cheapest strategy given those of the nodes before.
    """
    for value in tensors.arguments:
        placed = graph.tensors[value]
        shape = MeshTensor.from_type(value.type).type.shape
        graph.allow_only(placed.node, [_finest_along_largest(placed, shape)])
    sums: dict[int, np.ndarray] = {}
    for one in graph.ops:
        graph.allow_variants(one, lambda strategy: not strategy.unreduced)
        if one.result is not None:
            sums[one.node] = graph.edges[one.node, one.result].min(axis=1)
    before: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (source, target), matrix in graph.edges.items():
        before.setdefault(target, []).append((source, matrix))
    choice: list[int] = []
    for node, costs in enumerate(graph.costs):
        total = costs + sum(matrix[choice[source]] for source, matrix in before.get(node, ()))
        total = total + sums.get(node, 0.0)
        choice.append(int(np.argmin(total)))
    for node, strategy in enumerate(choice):
        graph.allow_only(node, [strategy])


def _finest_along_largest(placed: Placed, shape: Sequence[int]) -> int:
    """The layout with the most axes on the largest dimension that divides, and none elsewhere."""

    def key(number: int) -> tuple[int, int]:
        layout = placed.layouts[number]
        cut = [dim for dim, on in enumerate(layout) if on]
        return (shape[cut[0]], len(layout[cut[0]])) if len(cut) == 1 else (0, -len(cut))

    return max(range(len(placed.layouts)), key=key)
