"""What of a planned program lives on one mesh: its sharding problem, and a solution written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, cmp_to_key, lru_cache
from itertools import chain

import numpy as np

from alpa.dialects import body, func, ir, mpmd, sdy, terminator, walk
from alpa.dialects.attributes import (
    COMPUTE_SECONDS,
    SECONDS,
    Argument,
    MeshAssignment,
    Plan,
    State,
    argument_state,
    f64,
    read_arguments,
    read_meshes,
    read_part,
    read_results,
)
from alpa.dialects.mpmd_types import MeshTensor, read_topology
from alpa.dialects.sharding import Sharding, set_op_shardings
from alpa.passes.analysis.graph import first_reader, type_bytes
from alpa.passes.base import NoRoomError, Remark
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import size_text
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.baselines import StateKind, Tensors
from alpa.passes.sharding.kept_copies import return_copies
from alpa.passes.sharding.layouts import sharding_of
from alpa.passes.sharding.liveness import Held, Residence, held, op_at
from alpa.passes.sharding.ops import Op
from alpa.passes.sharding.shard_graph import Placed, RuleOf, ShardGraph
from alpa.passes.sharding.spaces import Layouts
from alpa.passes.sharding.step_costs import Snapshot, step_costs
from alpa.passes.sharding.strategies import local_elements
from alpa.passes.sharding.sums import deferrable, unreduced_axes
from alpa.passes.sharding.versions import Versions
from alpa.passes.solve.sharding.problem import OutOfMemoryError
from alpa.passes.solve.stages.schedule import in_flight

Step = tuple[mpmd.FragmentOp | mpmd.TransferOp | None, Snapshot]
"""An op that was added, None for the arguments, and all costs then."""

STORAGE_WEIGHT = 1e-3
"""What an argument's shard costs, as a part of the time to read it once: enough to break ties,
too little to buy communication."""


@dataclass(frozen=True)
class MeshPart:
    """What of @main lives on one mesh, and its sharding problem."""

    function: func.FuncOp
    name: str
    plan: Plan
    graph: ShardGraph
    landing_bandwidth: float
    versions: Versions
    """of the values that fragments exchange"""
    totals: frozenset[int] = frozenset()
    """results of @main that are gradients, read as sums over the micro-batches"""

    @classmethod
    def of(
        cls,
        function: func.FuncOp,
        assignment: MeshAssignment,
        cluster: Cluster,
        plan: Plan,
        rule_of: RuleOf,
        remark: Remark,
    ) -> MeshPart:
        shape, hosts = assignment.logical_shape, len(assignment.hosts)
        devices = len(assignment.devices) // hosts
        names = tuple(axis for axis, _ in read_topology(function)[assignment.name].axes)
        mesh = LogicalMesh.of(cluster, hosts, devices, shape, names)
        graph = ShardGraph(mesh, cluster, rule_of, remark)
        if cluster.hosts == 1:
            bandwidth = cluster.intra_host.bandwidth
        else:
            bandwidth = cluster.inter_host.bandwidth / devices
        meshes = [other.name for other in read_meshes(function)]
        kept = {
            name: in_flight(plan.schedule, plan.num_micro_batches, len(meshes) - stage)
            for stage, name in enumerate(meshes)
        }
        versions = Versions(mesh=assignment.name, kept=kept)
        return cls(function, assignment.name, plan, graph, bandwidth, versions)

    def build(self) -> list[Step]:
        """Adds arguments, then transfers and fragments in program order; what each costs."""
        return [(op, Snapshot.of(self.graph)) for op in self.build_in_steps()]

    def build_in_steps(self) -> Iterator[mpmd.FragmentOp | mpmd.TransferOp | None]:
        """As `build`, with a stop when the arguments are there and after each op."""
        block = body(self.function)
        states = self._state_results
        arguments: dict[State, Placed] = {}
        for number, (argument, attributes) in enumerate(
            zip(block.arguments, self._arguments, strict=True)
        ):
            tensor = MeshTensor.from_type(argument.type)
            if tensor.mesh == self.name:
                placed = self.graph.add_tensor(argument, tensor.type, given=tensor.sharding)
                self.graph.add_costs(placed, self._storage_costs(placed, tensor.type))
                arguments[argument_state(number, attributes)] = placed
        yield None
        for op in block.operations:
            if isinstance(op, mpmd.TransferOp):
                self._add_transfer(op, states, arguments)
                yield op
            elif isinstance(op, mpmd.FragmentOp) and self._is_mine(op):
                self._add_fragment(op, states, arguments)
                yield op

    def write_seconds(self, steps: Sequence[Step], choice: Sequence[int]) -> None:
        """Writes what one run of each fragment takes, collectives and resharding included.

        What was there, its compute split evenly over the devices, becomes `alpa.compute_seconds`.
        """
        costs = step_costs([snapshot for _, snapshot in steps], choice)
        for (op, _), cost in zip(steps, costs, strict=True):
            if isinstance(op, mpmd.FragmentOp):
                compute = op.attributes.get(SECONDS)
                if compute is not None:
                    op.attributes[COMPUTE_SECONDS] = compute
                op.attributes[SECONDS] = f64(cost / self._weight(op))

    def fragments(self) -> list[mpmd.FragmentOp]:
        ops = body(self.function).operations
        return [op for op in ops if isinstance(op, mpmd.FragmentOp) and self._is_mine(op)]

    def usages(self) -> list[Held]:
        """What this mesh holds when (`sharding/liveness.py`)."""
        block = body(self.function)
        arguments = self._arguments
        donated = {
            argument_state(number, attributes)
            for number, attributes in enumerate(arguments)
            if attributes.donor or attributes.aliasing_output is not None
        }
        new = {v for v, states in self._state_results.items() if donated & set(states)}
        return held(
            self.graph,
            [
                (value, attributes)
                for value, attributes in zip(block.arguments, arguments, strict=True)
                if value in self.graph.placed
            ],
            self.fragments(),
            [
                op.results[0]
                for op in block.operations
                if isinstance(op, mpmd.TransferOp) and op.results[0] in self.graph.placed
            ],
            Residence(
                num_micro_batches=self.plan.num_micro_batches,
                versions=self.versions,
                donated=frozenset(new),
                sums=self._sums,
            ),
        )

    def out_of_memory(self, error: OutOfMemoryError, usages: Sequence[Held]) -> NoRoomError:
        """A located error with what is needed, where, of what kind, and what would help."""
        device = self.graph.cluster.device
        least: dict[str, float] = {}
        for one in usages:
            if one.usage.start <= error.time < one.usage.stop:
                least[one.kind] = least.get(one.kind, 0.0) + float(one.usage.bytes.min())
        kinds = ", ".join(
            f"{kind} {size_text(size)}"
            for kind, size in sorted(least.items(), key=lambda item: -item[1])
            if size > 0
        )
        return NoRoomError(
            op_at(self.graph.ops_of, self.fragments(), error.time),
            f"needs at least {size_text(error.needed)} per device on {self.name}, {device.name} "
            f"has {size_text(error.limit)}; here, cut as finely as can be: {kinds}; raise the "
            "number of micro-batches so that each is smaller, keep fewer of them in flight "
            "(1f1b), add devices, or let stage-mesh-partition cut other stages with a larger "
            "reserve",
            missing=error.needed / error.limit - 1,
        )

    def tensors(self) -> Tensors:
        """The arguments on this mesh and what they are for, and what its updates make."""
        block = body(self.function)
        states: dict[ir.Value, StateKind] = {}
        mine: list[ir.Value] = []
        for argument, attributes in zip(block.arguments, self._arguments, strict=True):
            if argument not in self.graph.placed:
                continue
            mine.append(argument)
            if attributes.role == "state":
                parts = {read_part(use.owner) for use in argument.uses if _is_fragment(use.owner)}
                states[argument] = "optimizer" if parts == {"update"} else "parameter"
        updates = {
            result
            for op in self.fragments()
            if read_part(op) == "update"
            for inner in walk(body(op))
            for result in inner.results
        }
        return Tensors(states=states, arguments=tuple(mine), updates=frozenset(updates))

    def _storage_costs(self, placed: Placed, type_: ir.RankedTensorType) -> np.ndarray:
        """Breaks ties between layouts of an argument: slices are free, memory should be spared."""
        seconds = type_bytes(type_) / self.graph.cluster.device.memory_bandwidth
        return STORAGE_WEIGHT * seconds * self._shares(placed, type_)

    def _shares(self, placed: Placed, type_: ir.RankedTensorType) -> np.ndarray:
        """The part of a tensor that a device holds, per layout."""
        return _shares_of(tuple(type_.shape), self.graph.mesh.sizes, placed.layouts)

    def _is_mine(self, op: mpmd.FragmentOp) -> bool:
        return ir.StringAttr(op.attributes["mesh_name"]).value == self.name

    @cached_property
    def _arguments(self) -> list[Argument]:
        """Attributes of the arguments of @main."""
        return read_arguments(self.function)

    @cached_property
    def _state_results(self) -> dict[ir.Value, list[State]]:
        """The states that a returned value is the new value of."""
        states: dict[ir.Value, list[State]] = {}
        returned = terminator(body(self.function)).operands
        for value, result in zip(returned, read_results(self.function), strict=True):
            if result.state is not None:
                states.setdefault(value, []).append(result.state)
        return states

    @cached_property
    def _sums(self) -> dict[ir.Value, ir.RankedTensorType]:
        """Results that are means or sums over the micro-batches, with the types of their sums."""
        if self.plan.num_micro_batches == 1:
            return {}
        returned = terminator(body(self.function)).operands
        return {
            value: self.plan.accumulator_type(MeshTensor.from_type(value.type).type)
            for value, result in zip(returned, read_results(self.function), strict=True)
            if result.role is not None and result.role.kind in ("mean", "sum")
        }

    def _state_argument(
        self, value: ir.Value, states: dict[ir.Value, list[State]], arguments: dict[State, Placed]
    ) -> Placed | None:
        """The argument on this mesh whose layout a returned state has to take."""
        mine = [arguments[a] for a in states.get(value, ()) if a in arguments]
        for other in mine[1:]:
            self.graph.forbid_other_layouts(mine[0], other)
        return mine[0] if mine else None

    def _add_transfer(
        self,
        op: mpmd.TransferOp,
        states: dict[ir.Value, list[State]],
        arguments: dict[State, Placed],
    ) -> None:
        tensor = MeshTensor.from_type(op.results[0].type)
        if tensor.mesh != self.name:
            return
        state = self._state_argument(op.results[0], states, arguments)
        if state is not None:
            self.graph.placed[op.results[0]] = state
            return
        # What lands sharded crosses the slow links once; the consumer gathers over fast ones.
        placed = self.graph.add_tensor(op.results[0], tensor.type, open=False)
        seconds = type_bytes(tensor.type) / self.landing_bandwidth
        shares = self._shares(placed, tensor.type)
        weight = 1 if _crosses_once(op.results[0]) else self.plan.num_micro_batches
        self.graph.add_costs(placed, weight * seconds * shares)

    def _add_fragment(
        self,
        op: mpmd.FragmentOp,
        states: dict[ir.Value, list[State]],
        arguments: dict[State, Placed],
    ) -> None:
        weight = self._weight(op)
        block = body(op)
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            self.graph.placed[argument] = self.graph.placed[operand]
        if read_part(op) == "update":
            self._reduce_gradients(block)
        elif read_part(op) == "backward" and self.plan.num_micro_batches > 1:
            self.graph.deferrable |= deferrable(block, self._gradients(op))
        self.graph.add_block(block, weight)
        end = Op.of(terminator(block))
        for i, (inner, outer) in enumerate(zip(end.operands, op.results, strict=True)):
            placed = self._state_argument(outer, states, arguments)
            if placed is None and inner in self.graph.free:
                placed = self.graph.add_tensor(outer, inner.type)
            if placed is None:
                self.graph.placed[outer] = self.graph.placed[inner].closed
                continue
            need = placed.need
            self.graph.placed[outer] = placed.closed
            self.graph.operand_needs.append((end, i, need))
            self.graph.need(inner, need, weight)

    def _weight(self, op: mpmd.FragmentOp) -> int:
        """How often a fragment runs in a step."""
        return 1 if read_part(op) == "update" else self.plan.num_micro_batches

    def _gradients(self, op: mpmd.FragmentOp) -> list[int]:
        """The results of which all uses are of their sums over the micro-batches."""
        return [
            i
            for i, result in enumerate(op.results)
            if list(result.uses) and all(map(self._is_of_total, result.uses))
        ]

    def _is_of_total(self, use: ir.OpOperand) -> bool:
        """Whether a gradient is used by an update on this mesh, or returned as a sum."""
        if isinstance(use.owner, mpmd.FragmentOp):
            return self._is_mine(use.owner) and read_part(use.owner) == "update"
        return isinstance(use.owner, func.ReturnOp) and use.operand_number in self.totals

    def _reduce_gradients(self, block: ir.Block) -> None:
        """Reduces unreduced gradients where an update first reads them, once for all that it does.

        Not all where it begins: what they become would then be held all at once.
        """
        waiting: dict[ir.Value, ir.Attribute] = {}
        for argument in block.arguments:
            placed = self.graph.placed[argument]
            rank = ir.RankedTensorType(argument.type).rank
            unreduced = any(unreduced_axes(layout, rank) for layout in placed.layouts)
            if unreduced and list(argument.uses):
                unknown = Sharding.of(self.name, ((),) * rank)
                waiting[argument] = replace(unknown, open_dims=frozenset(range(rank))).to_attr()
        first = [(first_reader(argument, block), argument) for argument in waiting]
        for op, argument in sorted(first, key=cmp_to_key(_in_order)):
            with ir.InsertionPoint(op), block.owner.location:
                constraint = sdy.ShardingConstraintOp(argument, waiting[argument])
            argument.replace_all_uses_except(constraint.result, constraint.operation)
            self.graph.add_constraint(Op.of(constraint), weight=1)

    def annotate(self, choice: Sequence[int], shardings: dict[ir.Value, Sharding]) -> None:
        """Writes shardings on the ops of this mesh; collects those of values of @main."""
        block = body(self.function)
        for value in [*block.arguments, *(r for op in block.operations for r in op.results)]:
            if value in self.graph.placed:
                shardings[value] = self._sharding(value, self.graph.layout_of(value, choice))
        for constraint in self.graph.constraints:
            (value,) = constraint.results
            sharding = self._sharding(value, self.graph.layout_of(value, choice))
            constraint.view.attributes["sharding"] = sharding.to_attr()
        seconds = self._reshard_operands(choice)
        scattered = self._scatter_sums(choice)
        for op in chain.from_iterable(self.graph.ops_of.values()):
            if op.results:
                layouts = scattered.get(op.results[0]) or [
                    self.graph.layout_of(result, choice) for result in op.results
                ]
                set_op_shardings(op.view, tuple(map(self._sharding, op.results, layouts)))
        return_copies(self.fragments(), shardings, self.graph.mesh, seconds)

    def _reshard_operands(self, choice: Sequence[int]) -> dict[ir.Value, float]:
        """Shows each change of layout as an `sdy.sharding_constraint` before its first user.

        Gives the seconds that the problem has for each of them, by its result: those of all nodes
        that need it.
        """
        made: dict[tuple[ir.Value, Layout, ir.Block], ir.Value] = {}
        seconds: dict[ir.Value, float] = {}
        counted: set[tuple[ir.Value, int, Layouts]] = set()
        for op, i, need in self.graph.operand_needs:
            value = op.operands[i]
            wanted = need.layouts[choice[need.node]]
            if self.graph.layout_of(value, choice) == wanted:
                continue
            key = (value, wanted, op.view.operation.block)
            if key not in made:
                with ir.InsertionPoint(op.view), op.view.location:
                    made[key] = self._constraint(value, wanted).result
            op.view.operands[i] = made[key]
            charged = (value, need.node, need.layouts)
            if value in self.graph.placed and charged not in counted:
                counted.add(charged)
                source = self.graph.placed[value]
                matrix = self.graph.reshard_seconds(source.layouts, need.layouts, source.type)
                spent = float(matrix[choice[source.node], choice[need.node]])
                seconds[made[key]] = seconds.get(made[key], 0.0) + spent
        return seconds

    def _scatter_sums(self, choice: Sequence[int]) -> dict[ir.Value, tuple[Layout, ...]]:
        """Shows a reduce-scatter as an all-reduced result, which a constraint cuts.

        Gives the layouts that these ops have themselves, by their first result.
        """
        computed: dict[ir.Value, tuple[Layout, ...]] = {}
        for one in self.graph.ops:
            strategy = one.strategy(choice)
            if not strategy.scattered:
                continue
            (result,), (layout,) = one.op.results, strategy.results
            with ir.InsertionPoint.after(one.op.view), one.op.view.location:
                constraint = self._constraint(result, layout)
            result.replace_all_uses_except(constraint.result, constraint.operation)
            computed[result] = strategy.computed
        return computed

    def _constraint(self, value: ir.Value, layout: Layout) -> sdy.ShardingConstraintOp:
        sharding = self._sharding(value, layout)
        constraint = sdy.ShardingConstraintOp(value, sharding.to_attr())
        set_op_shardings(constraint, (sharding,))
        return constraint

    def _sharding(self, value: ir.Value, layout: Layout) -> Sharding:
        placed = self.graph.placed.get(value)
        type_ = ir.RankedTensorType(value.type if placed is None else placed.type)
        return sharding_of(self.name, self.graph.mesh.axis_names, layout, type_.rank)


@lru_cache(maxsize=4096)
def _shares_of(shape: tuple[int, ...], sizes: tuple[int, ...], layouts: Layouts) -> np.ndarray:
    whole = max(1, math.prod(shape))
    return np.array([local_elements(shape, sizes, layout) / whole for layout in layouts])


def _in_order(one: tuple[ir.Operation, ir.Value], other: tuple[ir.Operation, ir.Value]) -> int:
    if one[0] == other[0]:
        return 0
    return -1 if one[0].is_before_in_block(other[0]) else 1


def _is_fragment(op: ir.OpView) -> bool:
    return isinstance(op, mpmd.FragmentOp)


def _crosses_once(value: ir.Value) -> bool:
    """Whether only updates read what a transfer brings: then it is a sum over micro-batches."""
    users = [use.owner for use in value.uses]
    return all(isinstance(op, mpmd.FragmentOp) and read_part(op) == "update" for op in users)
