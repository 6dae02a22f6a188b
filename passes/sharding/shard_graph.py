"""The sharding problem of one mesh: nodes with strategies, edges with resharding costs.

* An argument of @main and the landing place of a transfer is a node whose strategies are its
  layouts; what is returned as a state takes the layout of that state's argument.
* A heavy op is a node whose strategies come from its sharding rule. What becomes of its partial
  sums (`sums.py`) is a second node, the layout of its result; the edge between the two says what
  that costs, and is infinite where it cannot be.
* An op with `alpa.follow` belongs to the node of the operand that it follows (Alpa merges
  element-wise ops into an operand), unless that operand enters the fragment from another one:
  there the layout may change, so the op starts a node of its own.
* Constants, and broadcasts that grow their operand, are computed in whatever layout is used.
* A loop variable is a node: its start, the region's argument and what the body yields agree.
* A constraint is a node with the layouts that it admits, a manual computation one with a single
  strategy. An op that nobody knows how to split runs whole on each device.

The cost of a node or an edge is what one training step spends: fragments that run for each
micro-batch count that often, loop bodies as often as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import numpy as np

from alpa.dialects import body, ir, sdy, stablehlo, terminator
from alpa.dialects.sharding import Sharding, ShardingRule
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import element_bytes, has_effects, type_bytes
from alpa.passes.analysis.op_kinds import TRIVIAL
from alpa.passes.base import PassError, Remark
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import size_text
from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.sharding import sums
from alpa.passes.sharding.convolutions import sound_rule, sound_strategies
from alpa.passes.sharding.manual import fixed_shardings, written_collectives
from alpa.passes.sharding.op_seconds import op_seconds
from alpa.passes.sharding.ops import Op, read_ops
from alpa.passes.sharding.spaces import Layouts, OpNode, Space, Sums
from alpa.passes.sharding.strategies import (
    Strategy,
    enumerate_strategies,
    follow,
    local_elements,
    meet,
    tensor_layouts,
)
from alpa.passes.sharding.user_shardings import layouts_within

RuleOf = Callable[[ir.OpView], ShardingRule | None]

_SCALAR = 0
_NO_LAYOUT = Layouts.of(((),))
_CONSTANTS = frozenset({"stablehlo.constant", "stablehlo.iota", "sdy.constant"})


class Placed(NamedTuple):
    """A value's node and its layout under each of the node's strategies.

    `open`: an op that follows the value may join its node.
    """

    node: int
    layouts: Layouts
    type: ir.Type
    """of the value inside fragments"""
    open: bool = True

    @property
    def need(self) -> Need:
        """That something else is brought to where the value lies."""
        return Need(self.node, self.layouts)

    @property
    def closed(self) -> Placed:
        """Where nothing that follows it joins the node."""
        return self._replace(open=False)


class Need(NamedTuple):
    """That a node's op wants an operand in these layouts, one per strategy of the node."""

    node: int
    layouts: Layouts


@dataclass(frozen=True, eq=False)
class Known:
    """What was worked out once for a mesh and a cluster; graphs of both may share it."""

    tables: dict[int, ReshardTable] = field(default_factory=dict)
    """by rank"""
    matrices: dict[tuple[Layouts, Layouts, ir.Type, float], np.ndarray | None] = field(
        default_factory=dict
    )
    spaces: dict[Hashable, Space] = field(default_factory=dict)
    sums: dict[Hashable, np.ndarray] = field(default_factory=dict)
    trivial: dict[Hashable, np.ndarray] = field(default_factory=dict)
    admitted: dict[tuple[Sharding, Layouts], Layouts] = field(default_factory=dict)
    bytes: dict[Hashable, np.ndarray | None] = field(default_factory=dict)
    """of `copies.LocalBytes`"""


@dataclass
class ShardGraph:
    """Built op by op by `shard_fragments`; `layout_of` reads a solution back."""

    mesh: LogicalMesh
    cluster: Cluster
    rule_of: RuleOf
    remark: Remark
    known: Known = field(default_factory=lambda: Known())
    costs: list[np.ndarray] = field(default_factory=lambda: [np.zeros(1)])
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    placed: dict[ir.Value, Placed] = field(default_factory=dict)
    free: dict[ir.Value, list[Need]] = field(default_factory=dict)
    """values that are computed in whatever layout is used"""
    operand_needs: list[tuple[Op, int, Need]] = field(default_factory=list)
    tensors: dict[ir.Value, Placed] = field(default_factory=dict)
    """nodes that are tensors: arguments, what transfers bring, variables of loops"""
    ops: list[OpNode] = field(default_factory=list)
    """nodes that are ops"""
    ruled: list[tuple[Op, ShardingRule, float]] = field(default_factory=list)
    """ops that are sharded by a rule, and how often they run in a step"""
    ops_of: dict[ir.Block, list[Op]] = field(default_factory=dict)
    """the ops of each block that was added, but its terminator"""
    constraints: list[Op] = field(default_factory=list)
    """nodes of their own: layouts that the program asks for, or that a solution fills in"""
    deferrable: set[ir.Value] = field(default_factory=set)
    """values that may stay unreduced, see `sums.deferrable`"""
    _broadcasts: dict[ir.Value, Op] = field(default_factory=dict)
    """of the free values those that are read from a tensor which may be sharded"""
    _counted: set[tuple[ir.Value, int, Layouts]] = field(default_factory=set)

    # Nodes

    def add_tensor(
        self,
        value: ir.Value,
        type_: ir.Type,
        *,
        open: bool = True,
        given: Sharding | None = None,
    ) -> Placed:
        """A node whose strategies are a tensor's layouts, or those that a given sharding admits."""
        layouts = self.layouts_of(type_)
        if given is not None:
            layouts = self._within(given, layouts)
        alone = len(layouts) == 1 and given is None
        node = _SCALAR if alone else self._add_node(np.zeros(len(layouts)))
        placed = Placed(node, layouts, type_, open)
        self.placed[value] = self.tensors[value] = placed
        return placed

    def layouts_of(self, type_: ir.Type) -> Layouts:
        if not isinstance(type_, ir.RankedTensorType):
            return _NO_LAYOUT
        return Layouts.of(tensor_layouts(tuple(type_.shape), self.mesh.sizes))

    def _within(self, given: Sharding, layouts: Layouts) -> Layouts:
        """Of some layouts those that a sharding admits."""
        key = (given, layouts)
        if key not in self.known.admitted:
            found = layouts_within(given, layouts, self.mesh.axis_names)
            self.known.admitted[key] = Layouts.of(found)
        return self.known.admitted[key]

    def _add_node(self, costs: np.ndarray) -> int:
        self.costs.append(costs)
        return len(self.costs) - 1

    def forbid_other_layouts(self, one: Placed, other: Placed) -> None:
        """Two nodes have to choose the same layout."""
        different = [[a != b for b in other.layouts] for a in one.layouts]
        if np.any(different):
            self._add_edge(one.node, other.node, np.where(different, np.inf, 0.0))

    def allow_only(self, node: int, strategies: Sequence[int]) -> None:
        """Forbids the other strategies of a node."""
        costs = np.full(self.costs[node].shape, np.inf)
        costs[list(strategies)] = self.costs[node][list(strategies)]
        self.costs[node] = costs

    def allow_variants(self, one: OpNode, admits: Callable[[Strategy], bool]) -> None:
        """Forbids an op's other strategies, and what else could become of its sums.

        Where none is admitted the op is replicated, which is the first strategy of each.
        """
        if one.result is None or one.space.sums is None:
            kept = [i for i, strategy in enumerate(one.space.strategies) if admits(strategy)]
            self.allow_only(one.node, kept or [0])
            return
        ways = one.space.sums.ways
        pairs = [pair for pair, strategy in ways.items() if admits(strategy)]
        pairs = pairs or [next(pair for pair in ways if pair[0] == 0)]
        old = self.edges[one.node, one.result]
        costs = np.full(old.shape, np.inf)
        rows, columns = (np.array(numbers) for numbers in zip(*pairs, strict=True))
        costs[rows, columns] = old[rows, columns]
        self.edges[one.node, one.result] = costs
        self.allow_only(one.node, sorted({i for i, _ in pairs}))
        self.allow_only(one.result, sorted({j for _, j in pairs}))

    def add_costs(self, placed: Placed, costs: np.ndarray) -> None:
        """Adds seconds per strategy to a value's node."""
        self.costs[placed.node] = self.costs[placed.node] + costs

    # Edges

    def need(self, value: ir.Value, need: Need, weight: float) -> None:
        """Adds what it costs to bring a value from its layouts to the needed ones."""
        if value in self.free:
            self.free[value].append(need)
            self._need_through_broadcast(value, need, weight)
            return
        source = self.placed[value]
        if source.node == need.node and (
            source.layouts is need.layouts or source.layouts == need.layouts
        ):
            return
        key = (value, need.node, need.layouts)
        if key in self._counted:
            return
        self._counted.add(key)
        matrix = self._matrix(source.layouts, need.layouts, source.type, weight)
        if matrix is None:
            return
        if source.node == need.node:
            self.costs[need.node] = self.costs[need.node] + np.diagonal(matrix)
        elif source.node == _SCALAR:
            self.costs[need.node] = self.costs[need.node] + matrix[0]
        elif need.node == _SCALAR:
            self.costs[source.node] = self.costs[source.node] + matrix[:, 0]
        else:
            self._add_edge(source.node, need.node, matrix)

    def _add_edge(self, source: int, target: int, matrix: np.ndarray) -> None:
        if source == target:
            self.costs[source] = self.costs[source] + np.diagonal(matrix)
            return
        if source > target:
            source, target, matrix = target, source, matrix.T
        old = self.edges.get((source, target))
        self.edges[source, target] = matrix if old is None else old + matrix

    def _need_through_broadcast(self, value: ir.Value, need: Need, weight: float) -> None:
        op = self._broadcasts.get(value)
        rule = None if op is None else self.rule_of(op.view)
        if op is None or rule is None:
            return
        (projected,) = self._follow_all(_backwards(rule), 0, need.layouts).results
        self.need(op.operands[0], Need(need.node, projected), weight)

    def reshard_seconds(self, source: Layouts, target: Layouts, type_: ir.Type) -> np.ndarray:
        """``[source, target]``: what it takes once to bring a tensor from one layout to another."""
        matrix = self._matrix(source, target, type_, 1.0)
        return np.zeros((len(source), len(target))) if matrix is None else matrix

    def _matrix(
        self, source: Layouts, target: Layouts, type_: ir.Type, weight: float
    ) -> np.ndarray | None:
        """Seconds per step to bring a tensor from each layout to each, `weight` times.

        None where it costs nothing.
        """
        key = (source, target, type_, weight)
        if key not in self.known.matrices:
            rank = type_.rank if isinstance(type_, ir.RankedTensorType) else 0
            plain = all(len(layout) <= rank for layout in (*source, *target))
            # A number has no layouts but its sums.
            if isinstance(type_, ir.RankedTensorType) and (rank > 0 or not plain):
                table = self.known.tables.get(type_.rank)
                if table is None:
                    table = ReshardTable(self.mesh, type_.rank)
                    self.known.tables[type_.rank] = table
                itemsize = element_bytes(type_.element_type)
                matrix_of = table.matrix if plain else partial(sums.matrix_with_sums, table)
                matrix = matrix_of(source, target, tuple(type_.shape), itemsize)
            else:
                matrix = np.zeros((len(source), len(target)))
            self.known.matrices[key] = weight * matrix if matrix.any() else None
        return self.known.matrices[key]

    # Ops

    def add_block(self, block: ir.Block, weight: float) -> None:
        """Adds all ops of a block but its terminator."""
        ops = self.ops_of[block] = read_ops(block)
        for op in ops:
            if not (op.results and all(result in self.placed for result in op.results)):
                self.add_op(op, weight)

    def add_op(self, op: Op, weight: float) -> None:
        """Adds one op that runs `weight` times per step."""
        if self._is_free(op):
            (result,) = op.results
            self.free[result] = []
            if op.operands and _rank(op.operands[0]) > 0:
                self._broadcasts[result] = op
            return
        view = op.view
        if isinstance(view, stablehlo.WhileOp):
            self._add_while(op, view, weight)
        elif isinstance(view, stablehlo.CaseOp | stablehlo.IfOp):
            self._add_branches(op, weight)
        elif isinstance(view, sdy.ShardingConstraintOp):
            self.add_constraint(op, weight)
        elif isinstance(view, sdy.ManualComputationOp):
            self._add_manual(op, view, weight)
        elif (
            all(_rank(v) == 0 for v in (*op.results, *op.operands))
            and not any(v in self.placed and len(self.placed[v].layouts) > 1 for v in op.operands)
            and not has_effects(view)
        ):
            for result in op.results:
                self.placed[result] = Placed(_SCALAR, _NO_LAYOUT, result.type)
        else:
            self._add_by_rule(op, weight)

    def add_constraint(self, op: Op, weight: float) -> None:
        """Adds a constraint, which brings its operand into one of the layouts that it admits."""
        given = Sharding.from_attr(op.view.attributes["sharding"])
        placed = self.add_tensor(op.results[0], op.results[0].type, given=given)
        self.need(op.operands[0], placed.need, weight)
        self.constraints.append(op)

    def _add_manual(self, op: Op, view: sdy.ManualComputationOp, weight: float) -> None:
        """Adds what is written for local shards: a node with one strategy."""
        seconds = op_seconds(view, self.cluster) / op_cost.manual_ways(view)
        seconds += sum(one.seconds(self.mesh) for one in written_collectives(view, self.mesh))
        node = self._add_node(np.array([weight * seconds]))
        inputs, outputs = fixed_shardings(view)
        for i, (operand, sharding) in enumerate(zip(op.operands, inputs, strict=True)):
            need = Need(node, self._exactly(sharding))
            self.operand_needs.append((op, i, need))
            self.need(operand, need, weight)
        for result, sharding in zip(op.results, outputs, strict=True):
            self.placed[result] = Placed(node, self._exactly(sharding), result.type)

    def _exactly(self, sharding: Sharding) -> Layouts:
        return Layouts.of(layouts_within(sharding, (), self.mesh.axis_names))

    def _is_free(self, op: Op) -> bool:
        if op.name == "stablehlo.broadcast_in_dim":
            return type_bytes(op.operands[0].type) < type_bytes(op.results[0].type)
        return op.name in _CONSTANTS

    def _add_by_rule(self, op: Op, weight: float) -> None:
        rule = self.rule_of(op.view)
        if rule is not None and isinstance(op.view, stablehlo.ConvolutionOp):
            rule = sound_rule(op.view, rule)
        if rule is None:
            self._add_replicated(op, weight)
            return
        self.ruled.append((op, rule, weight))
        leader = self._leader(op)
        result: int | None = None
        if leader is None:
            space = self._space(op, rule)
            node = self._add_node(np.zeros(len(space.strategies)))
            if space.sums is not None:
                result = self._add_node(np.zeros(len(space.sums.layouts)))
                self.edges[node, result] = weight * self._sum_costs(op, space, space.sums)
            self.ops.append(OpNode(op, node, space, result))
        else:
            operand, placed = leader
            node = placed.node
            deferrable = op.results[0] in self.deferrable
            linear = sums.linear_operands(op.view) if deferrable else ()
            space = self._follow_all(rule, operand, placed.layouts, linear)
        self.costs[node] = self.costs[node] + self._op_costs(op, space, weight)
        for i, (operand_value, layouts) in enumerate(zip(op.operands, space.operands, strict=True)):
            need = Need(node, layouts)
            self.operand_needs.append((op, i, need))
            self.need(operand_value, need, weight)
        if result is not None and space.sums is not None:
            value = op.results[0]
            self.placed[value] = Placed(result, space.sums.layouts, value.type)
            return
        for value, layouts in zip(op.results, space.results, strict=True):
            self.placed[value] = Placed(node, layouts, value.type)

    def _space(self, op: Op, rule: ShardingRule) -> Space:
        """The strategies of an op with a node of its own, with all that may become of its sums."""
        view = op.view
        stays = op.results[0] in self.deferrable and sums.starts_sums(view)
        key = (rule, op.name, stays)
        # What is sound for a convolution depends on more than its rule.
        if key in self.known.spaces and not isinstance(view, stablehlo.ConvolutionOp):
            return self.known.spaces[key]
        sizes = self.mesh.sizes
        found = sound_strategies(view, enumerate_strategies(rule, sizes), sizes)
        variants = [[strategy] for strategy in found]
        if len(op.results) == 1:
            shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
            for mine, strategy in zip(variants, found, strict=True):
                if strategy.reduced:
                    mine += sums.scatters(strategy, shape, sizes)
                if stays and sums.may_stay_unreduced(view, strategy):
                    mine.append(sums.unreduced(strategy))
        self.known.spaces[key] = Space.of(found, Sums.of(variants))
        return self.known.spaces[key]

    def _leader(self, op: Op) -> tuple[int, Placed] | None:
        operand = op.follow
        if operand is None:
            return None
        placed = self.placed.get(op.operands[operand])
        if placed is None or not placed.open or placed.node == _SCALAR:
            return None
        if op.results[0] in self.deferrable and sums.starts_sums(op.view):
            rank = _rank(op.operands[operand])
            if not any(sums.unreduced_axes(layout, rank) for layout in placed.layouts):
                return None  # A gradient's sum begins: whether it is reduced at once is a choice.
        return operand, placed

    def _follow_all(
        self, rule: ShardingRule, operand: int, layouts: Layouts, linear: tuple[int, ...] = ()
    ) -> Space:
        """`linear` are the operands that may be unreduced with the followed one."""
        key = (rule, operand, layouts, linear)
        if key not in self.known.spaces:
            rank, sizes = len(rule.operands[operand]), self.mesh.sizes
            found = [follow(rule, sizes, operand, layout[:rank]) for layout in layouts]
            if operand in linear:
                found = [
                    sums.with_unreduced(strategy, sums.unreduced_axes(layout, rank), linear)
                    for strategy, layout in zip(found, layouts, strict=True)
                ]
            self.known.spaces[key] = Space.of(found)
        return self.known.spaces[key]

    def _sum_costs(self, op: Op, space: Space, of: Sums) -> np.ndarray:
        """Seconds from each strategy to each layout of the result, infinite where none leads."""
        key = (of, op.results[0].type)
        if key not in self.known.sums:
            costs = np.full((len(space.strategies), len(of.layouts)), np.inf)
            for pair, way in of.ways.items():
                costs[pair] = 0.0
                if way.reduced:
                    costs[pair] = sums.sum_seconds(self.mesh, way, self._partial_bytes(op, way))
            self.known.sums[key] = costs
        return self.known.sums[key]

    def _op_costs(self, op: Op, space: Space, weight: float) -> np.ndarray:
        """Seconds per step of each strategy; once for all trivial ops of the same types."""
        if op.name not in TRIVIAL:
            return weight * (
                op_seconds(op.view, self.cluster) * space.shares + self._sum_seconds(op, space)
            )
        types = tuple([value.type for value in (*op.operands, *op.results)])
        key = (space, op.name, weight, types)
        found = self.known.trivial.get(key)
        if found is None:
            seconds = op_seconds(op.view, self.cluster) * space.shares
            seconds = seconds + self._sum_seconds(op, space)
            found = self.known.trivial[key] = weight * seconds
        return found

    def _sum_seconds(self, op: Op, space: Space) -> np.ndarray | float:
        """Of the sums that have no node of their own."""
        if space.sums is not None:
            return 0.0
        key = (space, *(result.type for result in op.results))
        if key not in self.known.sums:
            self.known.sums[key] = np.array(
                [
                    sums.sum_seconds(self.mesh, strategy, self._partial_bytes(op, strategy))
                    if strategy.reduced
                    else 0.0
                    for strategy in space.strategies
                ]
            )
        return self.known.sums[key]

    def _partial_bytes(self, op: Op, strategy: Strategy) -> list[float]:
        return [
            local_elements(ir.RankedTensorType(r.type).shape, self.mesh.sizes, layout)
            * element_bytes(ir.RankedTensorType(r.type).element_type)
            for r, layout in zip(op.results, strategy.computed, strict=True)
        ]

    def _add_replicated(self, op: Op, weight: float) -> None:
        """An op that nobody knows how to shard runs whole on each device."""
        view, name, way_out = op.view, op.name, ""
        if isinstance(view, stablehlo.CustomCallOp):
            name = f"the custom call @{ir.StringAttr(view.attributes['call_target_name']).value}"
            way_out = (
                "; alpa.passes.register_sharding_rule or an sdy.sharding_rule attribute would let "
                "it be split"
            )
            if has_effects(view):
                raise PassError(
                    view,
                    f"{name} has side effects and no sharding rule: each device would run it"
                    f"{way_out}",
                )
        devices = prod(self.mesh.sizes)
        num_bytes = sum(type_bytes(value.type) for value in [*op.operands, *op.results])
        seconds = op_seconds(view, self.cluster)
        if num_bytes > 0 and devices > 1:
            self.remark(
                view.location,
                f"{name} has no sharding rule: each of {devices} devices runs it whole, about "
                f"{1e6 * weight * seconds:.3g} us per step instead of "
                f"{1e6 * weight * seconds / devices:.3g}, on {size_text(num_bytes)} of operands "
                f"and results{way_out}",
            )
        if seconds:
            self.costs[_SCALAR] = self.costs[_SCALAR] + weight * seconds
        for i, operand in enumerate(op.operands):
            need = Need(_SCALAR, Layouts.of((_replicated(operand),)))
            self.operand_needs.append((op, i, need))
            self.need(operand, need, weight)
        for result in op.results:
            replica = Layouts.of((_replicated(result),))
            self.placed[result] = Placed(_SCALAR, replica, result.type)

    def _add_while(self, op: Op, view: stablehlo.WhileOp, weight: float) -> None:
        condition, loop = body(view, 0), body(view, 1)
        trips = op_cost.trip_count_or_default(view)
        for i, result in enumerate(op.results):
            placed = self.add_tensor(result, result.type)
            for block in (condition, loop):
                self.placed[block.arguments[i]] = placed
            need = placed.need
            self.operand_needs.append((op, i, need))
            self.need(op.operands[i], need, weight)
        self.add_block(condition, weight * trips)
        self.add_block(loop, weight * trips)
        self._need_yields(loop, op.results, weight * trips)

    def _add_branches(self, op: Op, weight: float) -> None:
        for result in op.results:
            self.add_tensor(result, result.type)
        for i in range(len(op.view.regions)):
            block = body(op.view, i)
            self.add_block(block, weight)
            self._need_yields(block, op.results, weight)

    def _need_yields(self, block: ir.Block, results: Sequence[ir.Value], weight: float) -> None:
        end = Op.of(terminator(block))
        for i, (value, result) in enumerate(zip(end.operands, results, strict=True)):
            placed = self.placed[result]
            need = placed.need
            self.operand_needs.append((end, i, need))
            self.need(value, need, weight)

    # Solutions

    def layout_of(self, value: ir.Value, choice: Sequence[int]) -> Layout:
        """A value's layout under a choice of one strategy per node."""
        if value in self.free:
            layout: Layout | None = None
            for need in self.free[value]:
                wanted = need.layouts[choice[need.node]]
                layout = wanted if layout is None else meet(layout, wanted)
            return _replicated(value) if layout is None else layout
        placed = self.placed[value]
        return placed.layouts[choice[placed.node]]


@lru_cache(maxsize=4096)
def _backwards(rule: ShardingRule) -> ShardingRule:
    return ShardingRule(rule.factor_sizes, rule.results, rule.operands)


def _replicated(value: ir.Value) -> Layout:
    return ((),) * max(0, _rank(value))


def _rank(value: ir.Value) -> int:
    """A tensor's rank; -1 for tokens and the like, which have no layout."""
    type_ = value.type
    return type_.rank if isinstance(type_, ir.RankedTensorType) else -1
