"""Adds ops to the graph of a mesh's sharding problem.

* A heavy op is a node whose strategies come from its sharding rule. What becomes of its partial
  sums (`sums.py`) is a second node, the layout of its result. The edge between the two has the
  seconds of the collectives, infinite where no strategy leads to that layout.
* An op with `alpa.follow` belongs to the node of the operand that it follows (Alpa merges
  element-wise ops into an operand), unless that operand enters the fragment from another one:
  there the layout may change, so the op starts a node of its own.
* Constants, and broadcasts that grow their operand, are computed in whatever layout is used.
* A loop variable is a node: its start, the region's argument and what the body yields agree.
* Each result of an optimization barrier is where its operand is.
* A constraint is a node with the layouts that it admits. One that admits all of them is where a
  partial sum is reduced; on any other value it is transparent.
* A manual computation is a node with a single strategy. An op without a rule runs whole on each
  device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from alpa.dialects import body, ir, sdy, stablehlo
from alpa.dialects.sharding import Sharding, ShardingRule
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import element_bytes, has_effects, type_bytes
from alpa.passes.analysis.op_kinds import CONTRACTIONS
from alpa.passes.base import PassError
from alpa.passes.cost.device import Share, seconds_text, size_text
from alpa.passes.sharding import convolutions, scatters, sums
from alpa.passes.sharding.copies import charge_storage
from alpa.passes.sharding.gradient_reductions import is_reduction
from alpa.passes.sharding.manual import fixed_shardings, written_collectives
from alpa.passes.sharding.op_seconds import work_seconds
from alpa.passes.sharding.ops import Kind, Op
from alpa.passes.sharding.padded_ops import padding_axes
from alpa.passes.sharding.shard_graph import (
    NO_LAYOUT,
    SCALAR,
    Need,
    Placed,
    Ruled,
    ShardGraph,
    rank,
    replicated,
)
from alpa.passes.sharding.spaces import Layouts, OpNode, Space, Sums
from alpa.passes.sharding.strategies import Strategy, enumerate_strategies, local_elements
from alpa.passes.sharding.user_shardings import layouts_within


@dataclass(frozen=True)
class OpPoser:
    """Adds ops to a graph, block by block."""

    graph: ShardGraph
    deferrable: set[ir.Value] = field(default_factory=set[ir.Value])
    """values that may stay unreduced, see `sums.deferrable`"""

    def add_block(self, block: ir.Block, weight: float) -> None:
        """Adds all ops of a block but its terminator; each runs `weight` times per step."""
        ops = self.graph.ops_of[block] = self.graph.reader.ops(block)
        placed = self.graph.placed
        for op in ops:
            if not op.results or op.results[0] not in placed:
                self._add(op, weight)

    def _add(self, op: Op, weight: float) -> None:
        view, placed = op.view, self.graph.placed
        if op.is_ordinary:
            self._add_by_rule(op, weight)
        elif op.is_free:
            (result,) = op.results
            self.graph.free[result] = []
            if op.operands and rank(op.operands[0]) > 0:
                self.graph.broadcasts[result] = op
        elif isinstance(view, stablehlo.WhileOp):
            self._add_while(op, view, weight)
        elif isinstance(view, stablehlo.CaseOp | stablehlo.IfOp):
            self._add_branches(op, weight)
        elif isinstance(view, sdy.ShardingConstraintOp):
            self._add_constraint(op, view, weight)
        elif isinstance(view, stablehlo.OptimizationBarrierOp) and self._passes_through(op):
            for value, result in zip(op.operands, op.results, strict=True):
                placed[result] = placed[value]
        elif isinstance(view, sdy.ManualComputationOp):
            self._add_manual(op, view, weight)
        elif op.is_scalar and not any(
            v in placed and len(placed[v].layouts) > 1 for v in op.operands
        ):
            for result in op.results:
                placed[result] = Placed(SCALAR, NO_LAYOUT, result.type)
        else:
            self._add_by_rule(op, weight)

    def _passes_through(self, op: Op) -> bool:
        """Whether each result of a barrier can be where its operand is: none is a partial sum."""
        placed = [self.graph.placed.get(value) for value in op.operands]
        return all(one is not None and not one.has_sums for one in placed)

    def _add_constraint(self, op: Op, view: sdy.ShardingConstraintOp, weight: float) -> None:
        """A constraint brings its operand into one of the layouts that it admits."""
        (value,), (result,) = op.operands, op.results
        source = self.graph.placed.get(value)
        if source is not None and is_reduction(view) and not source.has_sums:
            self.graph.placed[result] = source
            self.graph.transparent.append(op)
            return
        given = Sharding.from_attr(op.view.attributes["sharding"])
        placed = self.graph.add_tensor(result, result.type, given=given)
        self.graph.need(value, placed.need, weight)
        self.graph.constraints.append(op)

    def _add_manual(self, op: Op, view: sdy.ManualComputationOp, weight: float) -> None:
        """What is written for local shards has one strategy. One device, which bounds of meshes
        come from, computes all shards."""
        mesh = self.graph.timed_mesh
        ways = op_cost.manual_ways(view) if mesh.num_devices > 1 else 1
        seconds = self._seconds(op, 1 / ways)
        seconds += sum(one.seconds(mesh) for one in written_collectives(view, mesh))
        node = self.graph.terms.add_node(np.zeros(1))
        self.graph.charge((node,), np.array([weight * seconds]))
        inputs, outputs = (
            [Layouts.of(layouts_within(sharding, (), mesh)) for sharding in shardings]
            for shardings in fixed_shardings(view)
        )
        for i, layouts in enumerate(inputs):
            self.graph.need_operand(op, i, Need(node, layouts), weight)
        for result, layouts in zip(op.results, outputs, strict=True):
            self.graph.placed[result] = Placed(node, layouts, result.type)

    def _add_by_rule(self, op: Op, weight: float) -> None:
        graph = self.graph
        kind = graph.reader.kind(op)
        if kind is None:
            self._add_replicated(op, weight)
            return
        graph.ruled.append(Ruled(op, kind.rule, weight, len(graph.steps) - 1))
        leader = self._leader(op)
        result: int | None = None
        if leader is None:
            space, costs, sum_costs = self._alone(op, kind, weight)
            node = graph.terms.add_node(costs)
            if space.sums is not None and sum_costs is not None:
                result = graph.terms.add_node(np.zeros(len(space.sums.layouts)))
                graph.charge((node, result), sum_costs)
            graph.ops.append(OpNode(op, node, space, result))
        else:
            node = leader[1].node
            space, costs = self._following(op, kind, weight, *leader)
        graph.charge((node,), costs, is_made=leader is None)
        for i, layouts in enumerate(space.operands):
            graph.need_operand(op, i, Need(node, layouts), weight)
        if result is not None and space.sums is not None:
            (value,) = op.results
            graph.placed[value] = Placed(result, space.sums.layouts, value.type)
            return
        for value, layouts in zip(op.results, space.results, strict=True):
            graph.placed[value] = Placed(node, layouts, value.type)

    def _alone(
        self, op: Op, kind: Kind, weight: float
    ) -> tuple[Space, np.ndarray, np.ndarray | None]:
        """The strategies of an op with a node of its own, their seconds per step, and those of what
        may become of its sums."""
        stays = self._is_deferrable(op) and op.starts_sums
        cache, alike = self.graph.cache, ("alone", kind, stays, self.graph.timed_mesh.backward)

        def make() -> tuple[Space, np.ndarray, np.ndarray | None]:
            space = self._space(op, kind.rule, stays=stays)
            seconds = self._op_seconds(op, space)
            return space, seconds, space.sums and self._sum_seconds(op, space, space.sums)

        def weighted() -> tuple[Space, np.ndarray, np.ndarray | None]:
            space, seconds, of_sums = cache.once(alike, make)
            if of_sums is not None:
                # A loop without trips: what is not possible stays so.
                of_sums = weight * of_sums if weight else np.where(np.isinf(of_sums), np.inf, 0.0)
            return space, weight * seconds, of_sums

        return cache.once((*alike, weight), weighted)

    def _following(
        self, op: Op, kind: Kind, weight: float, operand: int, placed: Placed
    ) -> tuple[Space, np.ndarray]:
        """The strategies of an op that takes an operand as it lies, and their seconds per step."""
        linear = op.linear_operands if self._is_deferrable(op) else ()
        cache, backward = self.graph.cache, self.graph.timed_mesh.backward
        alike = "follows", kind, operand, placed.layouts, linear, backward

        def make() -> tuple[Space, np.ndarray]:
            space = self.graph.following(kind.rule, operand, placed.layouts, linear)
            return space, self._op_seconds(op, space)

        def weighted() -> tuple[Space, np.ndarray]:
            space, seconds = cache.once(alike, make)
            return space, weight * seconds

        return cache.once((*alike, weight), weighted)

    def _space(self, op: Op, rule: ShardingRule, *, stays: bool) -> Space:
        """The strategies of an op with a node of its own, with all that may become of its sums,
        which may stay partial if the op `stays`."""
        view, sizes = op.view, self.graph.mesh.sizes
        padding = padding_axes(view, rule, sizes)

        def make() -> Space:
            found = enumerate_strategies(rule, sizes, padding)
            found = convolutions.sound_strategies(view, found, sizes)
            found = scatters.sound_strategies(view, found, sizes)
            variants = [[strategy] for strategy in found]
            if len(op.results) == 1:
                shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
                for mine, strategy in zip(variants, found, strict=True):
                    if strategy.reduced:
                        mine += sums.scatters(strategy, shape, sizes)
                    if stays and not strategy.padded and sums.may_stay_unreduced(view, strategy):
                        mine.append(sums.unreduced(strategy, strategy.reduced))
            return Space.of(found, Sums.of(variants))

        # What is sound for a convolution depends on more than its rule.
        if isinstance(view, stablehlo.ConvolutionOp):
            return make()
        return self.graph.cache.once(("space", rule, op.name, op.numbers, stays), make)

    def _is_deferrable(self, op: Op) -> bool:
        """Whether the result of an op may stay unreduced."""
        return bool(self.deferrable) and op.results[0] in self.deferrable

    def _leader(self, op: Op) -> tuple[int, Placed] | None:
        """The operand whose node an op joins, and where it is."""
        if op.follow is None:
            return None
        placed = self.graph.placed.get(op.operands[op.follow])
        if placed is None or not placed.open or placed.node == SCALAR:
            return None
        begins = self._is_deferrable(op) and op.starts_sums
        if begins and not placed.has_sums:
            return None  # The search decides whether this sum of a gradient is reduced at once.
        return op.follow, placed

    def _sum_seconds(self, op: Op, space: Space, of: Sums) -> np.ndarray:
        """Seconds from each strategy to each layout of the result, infinite where none leads."""
        seconds = np.full((len(space.strategies), len(of.layouts)), np.inf)
        rows, columns = zip(*of.ways, strict=True)
        seconds[rows, columns] = self._reduce_seconds(op, list(of.ways.values()))
        return seconds

    def _op_seconds(self, op: Op, space: Space) -> np.ndarray:
        """Seconds of one run of each strategy."""
        seconds = self._seconds(op, space.shares, self._byte_shares(op, space))
        if space.sums is None:  # Sums with a node of their own are charged there.
            seconds += self._reduce_seconds(op, space.strategies)
        return seconds

    def _seconds(self, op: Op, share: Share, byte_share: Share | None = None) -> Share:
        if self.graph.cluster.equation is not None:
            return 0.0 * share  # Equation 4 has messages only.
        return work_seconds(op.work, self.graph.cluster.device, share, byte_share=byte_share)

    def _byte_shares(self, op: Op, space: Space) -> np.ndarray | None:
        """The share of a contraction's bytes on one device, by strategy; None for other ops.

        Each device reads all of an operand that is not split, such as the weights under data
        parallelism. The values of other ops are split as their work is, and those of all ops on
        ideal devices.
        """
        if op.name not in CONTRACTIONS or self.graph.cluster.device.efficiency is None:
            return None
        values = [ir.RankedTensorType(type_) for type_ in op.types]

        def make() -> np.ndarray:
            sizes = self.graph.mesh.sizes
            local = [
                sum(
                    local_elements(t.shape, sizes, layout) * element_bytes(t.element_type)
                    for t, layout in zip(
                        values, (*strategy.operands, *strategy.computed), strict=True
                    )
                )
                for strategy in space.strategies
            ]
            return np.array(local) / sum(map(type_bytes, values))

        return self.graph.cache.once(("byte shares", space, *values), make)

    def _reduce_seconds(self, op: Op, strategies: Sequence[Strategy]) -> list[float]:
        """Seconds of the collectives on an op's partial sums."""
        graph, mesh = self.graph, self.graph.timed_mesh
        if not any(strategy.reduced for strategy in strategies):
            return [0.0] * len(strategies)
        types = [ir.RankedTensorType(result.type) for result in op.results]
        shapes = [(tuple(t.shape), element_bytes(t.element_type)) for t in types]

        def one(strategy: Strategy) -> float:
            if not strategy.reduced:
                return 0.0
            sizes = tuple(
                [
                    local_elements(shape, mesh.sizes, layout) * itemsize
                    for (shape, itemsize), layout in zip(shapes, strategy.computed, strict=True)
                ]
            )
            alike = (strategy.reduced, strategy.scattered, strategy.unreduced, sizes)
            return graph.cache.once(
                ("reduce", *alike, mesh.backward),
                lambda: sums.seconds_at_once(mesh, strategy, sizes),
            )

        return list(map(one, strategies))

    def _add_replicated(self, op: Op, weight: float) -> None:
        """An op without a sharding rule runs whole on each device."""
        view, name, remedy = op.view, op.name, ""
        if isinstance(view, stablehlo.CustomCallOp):
            name = f"the custom call @{ir.StringAttr(view.attributes['call_target_name']).value}"
            remedy = (
                "; alpa.passes.register_sharding_rule or an sdy.sharding_rule attribute would let "
                "it be split"
            )
            if has_effects(view):
                raise PassError(
                    view,
                    f"{name} has side effects and no sharding rule: each device would run it"
                    f"{remedy}",
                )
        devices = prod(self.graph.mesh.sizes)
        num_bytes = sum(map(type_bytes, op.types))
        seconds = self._seconds(op, 1.0)
        if num_bytes > 0 and devices > 1:
            message = (
                f"{name} has no sharding rule: each of {devices} devices runs it whole, about "
                f"{seconds_text(weight * seconds)} per step instead of "
                f"{seconds_text(weight * seconds / devices)}, on {size_text(num_bytes)} of "
                f"operands and results{remedy}"
            )
            self.graph.remarks.append((view.location, message))
        self.graph.charge((SCALAR,), np.array([weight * seconds]))
        for i, operand in enumerate(op.operands):
            need = Need(SCALAR, Layouts.of((replicated(operand),)))
            self.graph.need_operand(op, i, need, weight)
        for result in op.results:
            replica = Layouts.of((replicated(result),))
            self.graph.placed[result] = Placed(SCALAR, replica, result.type)

    def _add_while(self, op: Op, view: stablehlo.WhileOp, weight: float) -> None:
        condition, loop = body(view, 0), body(view, 1)
        trips = op_cost.trip_count_or_default(view)
        for i, result in enumerate(op.results):
            placed = self.graph.add_tensor(result, result.type)
            charge_storage(self.graph, placed)
            for block in (condition, loop):
                self.graph.placed[block.arguments[i]] = placed
            self.graph.need_operand(op, i, placed.need, weight)
        self.add_block(condition, weight * trips)
        self.add_block(loop, weight * trips)
        self._need_yields(loop, op.results, weight * trips)

    def _add_branches(self, op: Op, weight: float) -> None:
        for result in op.results:
            self.graph.add_tensor(result, result.type)
        for i in range(len(op.view.regions)):
            block = body(op.view, i)
            self.add_block(block, weight)
            self._need_yields(block, op.results, weight)

    def _need_yields(self, block: ir.Block, results: Sequence[ir.Value], weight: float) -> None:
        end = self.graph.reader.end(block)
        for i, result in enumerate(results):
            self.graph.need_operand(end, i, self.graph.placed[result].need, weight)
