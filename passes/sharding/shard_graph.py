"""The sharding problem of one mesh as a graph: nodes with strategies, edges with resharding costs.

A node is an op or a tensor, its strategies are layouts. An edge says what it costs to bring a value
from the layout that one node gives it to the layout that another one needs. `OpPoser` adds ops,
`MeshProblem` adds what surrounds them. Building a graph changes no IR.

The cost of a node or an edge is what one training step spends: fragments that run for each
micro-batch count that often, loop bodies as often as they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from alpa.dialects import ir, mpmd
from alpa.dialects.attributes import read_part
from alpa.dialects.sharding import Sharding, ShardingRule
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.sharding import sums
from alpa.passes.sharding.ops import Cache, Op, OpReader
from alpa.passes.sharding.spaces import Layouts, OpNode, Space
from alpa.passes.sharding.strategies import Strategy, follow, meet, tensor_layouts
from alpa.passes.sharding.user_shardings import layouts_within
from alpa.passes.solve.sharding.terms import Terms

SCALAR = 0
"""The node of what has one layout only."""
NO_LAYOUT = Layouts.of(((),))


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
    def has_sums(self) -> bool:
        """Whether some strategy leaves the value as partial sums."""
        rank = self.type.rank if isinstance(self.type, ir.RankedTensorType) else 0
        return max(map(len, self.layouts)) > rank

    @property
    def need(self) -> Need:
        """The need of an op that takes another value in the layouts of this one."""
        return Need(self.node, self.layouts)

    @property
    def closed(self) -> Placed:
        """The same place, but ops that follow the value start nodes of their own."""
        return self._replace(open=False)


class Need(NamedTuple):
    """The layouts in which a node's op needs an operand, one per strategy of the node."""

    node: int
    layouts: Layouts


class Charge(NamedTuple):
    """Seconds of one step, by strategy of a node or by the strategies of two."""

    step: int
    nodes: tuple[int, ...]
    costs: np.ndarray


class Ruled(NamedTuple):
    """An op that is sharded by a rule, and how often it runs in a training step."""

    op: Op
    rule: ShardingRule
    weight: float
    step: int


@dataclass
class ShardGraph:
    """Nodes, edges, and where each value is; `layout_of` reads an assignment back.

    A graph is built in steps: the arguments, then transfers and fragments in program order. What
    is added in a step is charged to it.
    """

    mesh: LogicalMesh
    cluster: Cluster
    reader: OpReader
    cache: Cache = field(default_factory=Cache)
    """what was made for this mesh and cluster; all graphs of both may share it"""
    terms: Terms = field(default_factory=lambda: Terms([np.zeros(1)]))
    steps: list[ir.OpView | None] = field(default_factory=list[ir.OpView | None])
    """the op that each step adds; None for the arguments"""
    charges: list[Charge] = field(default_factory=list[Charge])
    placed: dict[ir.Value, Placed] = field(default_factory=dict[ir.Value, Placed])
    free: dict[ir.Value, list[Need]] = field(default_factory=dict[ir.Value, list[Need]])
    """values that are computed in whatever layout is used"""
    broadcasts: dict[ir.Value, Op] = field(default_factory=dict[ir.Value, Op])
    """of the free values those that are read from a tensor which may be sharded"""
    operand_needs: list[tuple[Op, int, Need]] = field(default_factory=list[tuple[Op, int, Need]])
    tensors: dict[ir.Value, Placed] = field(default_factory=dict[ir.Value, Placed])
    """nodes that are tensors: arguments, what transfers bring, variables of loops"""
    ops: list[OpNode] = field(default_factory=list[OpNode])
    """nodes that are ops"""
    ruled: list[Ruled] = field(default_factory=list[Ruled])
    ops_of: dict[ir.Block, list[Op]] = field(default_factory=dict[ir.Block, list[Op]])
    """the ops of each block that was added, but its terminator"""
    constraints: list[Op] = field(default_factory=list[Op])
    """nodes of their own: layouts that the program asks for, or that an assignment fills in"""
    transparent: list[Op] = field(default_factory=list[Op])
    """constraints that ask for nothing, on values that are no partial sums"""
    remarks: list[tuple[ir.Location, str]] = field(default_factory=list[tuple[ir.Location, str]])
    _counted: dict[tuple[ir.Value, Need], int] = field(
        default_factory=dict[tuple[ir.Value, Need], int]
    )
    """the needs whose costs were added, and how many collectives XLA may combine theirs with"""

    @property
    def costs(self) -> list[np.ndarray]:
        """Seconds by node and strategy."""
        return self.terms.nodes

    @property
    def edges(self) -> dict[tuple[int, int], np.ndarray]:
        """Seconds by pair of nodes and pair of strategies."""
        return self.terms.edges

    # Costs

    @property
    def timed_mesh(self) -> LogicalMesh:
        """The mesh with the costs of the current step, which depend on its part if the cluster has
        an equation of costs."""
        if self.mesh.equation is None:
            return self.mesh
        step = self.steps[-1] if self.steps else None
        if not isinstance(step, mpmd.FragmentOp):
            return self.mesh
        backward = read_part(step) != "forward"
        return self.cache.once(("mesh", backward), lambda: replace(self.mesh, backward=backward))

    def charge(self, nodes: tuple[int, ...], costs: np.ndarray, *, is_made: bool = False) -> None:
        """Adds seconds of the current step to a node, or to a pair. A node that `is_made` with them
        has them already: so nodes of equal costs share an array."""
        self.charges.append(Charge(len(self.steps) - 1, nodes, costs))
        if not is_made:
            self.terms.add(nodes, costs)

    def step_seconds(self, choice: Sequence[int]) -> list[float]:
        """What each step costs under an assignment of strategies."""
        seconds = [0.0] * len(self.steps)
        for step, nodes, costs in self.charges:
            seconds[step] += costs.item(*[choice[node] for node in nodes])
        return seconds

    # Nodes

    def add_tensor(
        self,
        value: ir.Value,
        type_: ir.Type,
        *,
        open: bool = True,
        given: Sharding | None = None,
        partial: Sequence[Layout] = (),
    ) -> Placed:
        """Adds a node whose strategies are a tensor's layouts that a given sharding admits.

        `partial` are layouts of partial sums that it may have, too.
        """
        layouts = Layouts.of((*self.layouts_of(type_), *partial))
        if given is not None:
            layouts = Layouts.of(layouts_within(given, layouts, self.mesh))
        alone = len(layouts) == 1 and given is None
        node = SCALAR if alone else self.terms.add_node(np.zeros(len(layouts)))
        placed = Placed(node, layouts, type_, open)
        self.placed[value] = self.tensors[value] = placed
        return placed

    def layouts_of(self, type_: ir.Type) -> Layouts:
        if not isinstance(type_, ir.RankedTensorType):
            return NO_LAYOUT
        return Layouts.of(tensor_layouts(tuple(type_.shape), self.mesh.sizes))

    def forbid_other_layouts(self, one: Placed, other: Placed) -> None:
        """Forces two nodes to take the same layout."""
        different = [[a != b for b in other.layouts] for a in one.layouts]
        if np.any(different):
            self.terms.add((one.node, other.node), np.where(different, np.inf, 0.0))

    def allow_only(self, node: int, strategies: Sequence[int]) -> None:
        """Forbids the other strategies of a node."""
        forbidden = np.full(self.costs[node].shape, np.inf)
        forbidden[list(strategies)] = 0.0
        self.terms.add((node,), forbidden)

    def allow_variants(self, one: OpNode, admits: Callable[[Strategy], bool]) -> None:
        """Forbids an op's other strategies, and the other variants of its sums.

        If none is admitted, the op is replicated, which is its first strategy.
        """
        if one.result is None or one.space.sums is None:
            kept = [i for i, strategy in enumerate(one.space.strategies) if admits(strategy)]
            self.allow_only(one.node, kept or [0])
            return
        ways = one.space.sums.ways
        pairs = [pair for pair, strategy in ways.items() if admits(strategy)]
        pairs = pairs or [next(pair for pair in ways if pair[0] == 0)]
        forbidden = np.full((len(one.space.strategies), len(one.space.sums.layouts)), np.inf)
        forbidden[tuple(zip(*pairs, strict=True))] = 0.0
        self.terms.add((one.node, one.result), forbidden)
        self.allow_only(one.node, sorted({i for i, _ in pairs}))
        self.allow_only(one.result, sorted({j for _, j in pairs}))

    # Edges

    def need_operand(self, op: Op, number: int, need: Need, weight: float) -> None:
        """Adds the cost of resharding an op's operand to the needed layouts."""
        self.operand_needs.append((op, number, need))
        self.need(op.operands[number], need, weight)

    def need(self, value: ir.Value, need: Need, weight: float) -> None:
        """Adds the cost of resharding a value from its layouts to the needed ones."""
        source = self.placed.get(value)
        if source is None:
            self.free[value].append(need)
            if self.mesh.equation is not None and self.mesh.equation.constants:
                self._need_constant(value, need, weight)
            self._need_through_broadcast(value, need, weight)
            return
        if source.layouts == need.layouts and (source.node == need.node or len(need.layouts) == 1):
            return
        key = value, need
        if key in self._counted:
            return
        step = self.steps[-1] if self.steps else None
        combined = self.reader.combined_with(value, step, self.mesh)
        self._counted[key] = combined
        matrix = self._matrix(source.layouts, need.layouts, source.type, weight, combined)
        if matrix is None:
            return
        if source.node == SCALAR:
            self.charge((need.node,), matrix[0])
        elif need.node == SCALAR:
            self.charge((source.node,), matrix[:, 0])
        else:
            self.charge((source.node, need.node), matrix)

    def _need_through_broadcast(self, value: ir.Value, need: Need, weight: float) -> None:
        """Adds the cost of resharding the tensor that a free value is a broadcast of."""
        op = self.broadcasts.get(value)
        rule = None if op is None else self.reader.rule(op)
        if op is not None and rule is not None:
            (projected,) = self.following(_backwards(rule), 0, need.layouts).results
            self.need(op.operands[0], Need(need.node, projected), weight)

    def _need_constant(self, value: ir.Value, need: Need, weight: float) -> None:
        """Adds the cost of bringing a constant from its finest layout, as if it were a weight."""
        layouts = self.layouts_of(value.type)
        axes = [sum(map(len, layout)) for layout in layouts]
        finest = Layouts.of(
            layout for layout, count in zip(layouts, axes, strict=True) if count == max(axes)
        )
        matrix = self._matrix(finest, need.layouts, value.type, weight, 1)
        if matrix is not None:
            self.charge((need.node,), matrix.min(axis=0))

    def need_seconds(self, value: ir.Value, need: Need) -> np.ndarray:
        """``[source, target]``: seconds of resharding a value once, as `need` added them."""
        source, combined = self.placed[value], self._counted.get((value, need), 1)
        return self.reshard_seconds(source.layouts, need.layouts, source.type, combined=combined)

    def reshard_seconds(
        self, source: Layouts, target: Layouts, type_: ir.Type, *, combined: int = 1
    ) -> np.ndarray:
        """``[source, target]``: seconds of resharding a tensor once."""
        matrix = self._matrix(source, target, type_, 1.0, combined)
        return np.zeros((len(source), len(target))) if matrix is None else matrix

    def _matrix(
        self, source: Layouts, target: Layouts, type_: ir.Type, weight: float, combined: int
    ) -> np.ndarray | None:
        """``[source, target]``: seconds of resharding `weight` times; None if it costs nothing."""
        mesh = self.timed_mesh
        alike = "reshard", source, target, type_, combined, mesh.backward

        def make() -> np.ndarray | None:
            if not isinstance(type_, ir.RankedTensorType):
                return None
            rank, itemsize = type_.rank, element_bytes(type_.element_type)
            key = ("table", rank, combined, mesh.backward)
            table = self.cache.once(
                key, lambda: ReshardTable(replace(mesh, combined=combined), rank)
            )
            matrix = sums.matrix_with_sums(table, source, target, tuple(type_.shape), itemsize)
            return matrix if matrix.any() else None

        def weighted() -> np.ndarray | None:
            matrix = self.cache.once(alike, make)
            return None if matrix is None else weight * matrix

        return self.cache.once((*alike, weight), weighted)

    def following(
        self, rule: ShardingRule, operand: int, layouts: Layouts, linear: tuple[int, ...] = ()
    ) -> Space:
        """The strategies of an op that takes an operand as it lies.

        `linear` are the operands that may be unreduced with the followed one.
        """

        def make() -> Space:
            rank, sizes = len(rule.operands[operand]), self.mesh.sizes
            found = [follow(rule, sizes, operand, layout[:rank]) for layout in layouts]
            if operand in linear:
                found = [
                    sums.unreduced(strategy, sums.unreduced_axes(layout, rank), linear)
                    for strategy, layout in zip(found, layouts, strict=True)
                ]
            return Space.of(found)

        return self.cache.once(("following", rule, operand, layouts, linear), make)

    # Solutions

    def layout_of(self, value: ir.Value, choice: Sequence[int]) -> Layout:
        """A value's layout under an assignment of one strategy per node."""
        if value in self.free:
            # Many needs of a constant want it in few layouts.
            wanted = dict.fromkeys(need.layouts[choice[need.node]] for need in self.free[value])
            return reduce(meet, wanted) if wanted else replicated(value)
        placed = self.placed[value]
        return placed.layouts[choice[placed.node]]


@lru_cache(maxsize=4096)
def _backwards(rule: ShardingRule) -> ShardingRule:
    sizes, padded = rule.factor_sizes, rule.padded
    return ShardingRule(sizes, rule.results, rule.operands, padded=padded)


def replicated(value: ir.Value) -> Layout:
    return ((),) * max(0, rank(value))


def rank(value: ir.Value) -> int:
    """A tensor's rank; -1 for tokens and the like, which have no layout."""
    type_ = value.type
    return type_.rank if isinstance(type_, ir.RankedTensorType) else -1
