"""Writes an assignment of strategies into the IR: shardings of values, seconds of fragments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from alpa.dialects import body, func, ir, mpmd, sdy, terminator
from alpa.dialects.attributes import COMPUTE_SECONDS, SECONDS
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.records import f64
from alpa.dialects.sharding import Sharding, set_op_shardings
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.call_seconds import call_seconds
from alpa.passes.sharding.kept_copies import return_copies
from alpa.passes.sharding.layouts import sharding_of
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.op_seconds import total_seconds
from alpa.passes.sharding.shard_graph import Need, ShardGraph


def annotate(
    function: func.FuncOp, assignments: Iterable[tuple[MeshProblem, Sequence[int]]]
) -> None:
    """Writes an assignment for each mesh of a planned `@main`, and the types of its values."""
    shardings: dict[ir.Value, Sharding] = {}
    for posed, choice in assignments:
        _Decoder(posed, choice).annotate(shardings)
    block = body(function)
    for value in [*block.arguments, *(r for op in block.operations for r in op.results)]:
        tensor = MeshTensor.from_type(value.type)
        value.set_type(replace(tensor, sharding=shardings[value]).to_type())
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get(
            [argument.type for argument in block.arguments],
            [value.type for value in terminator(block).operands],
        )
    )


@dataclass(frozen=True)
class _Decoder:
    """One strategy per node of a mesh's problem."""

    posed: MeshProblem
    choice: Sequence[int]
    _layouts: dict[ir.Value, Layout] = field(default_factory=dict[ir.Value, Layout])

    @property
    def _graph(self) -> ShardGraph:
        return self.posed.graph

    def annotate(self, shardings: dict[ir.Value, Sharding]) -> None:
        """Writes seconds on fragments and shardings on ops; collects those of values of @main."""
        self._write_seconds()
        block = body(self.posed.function)
        for value in [*block.arguments, *(r for op in block.operations for r in op.results)]:
            if value in self._graph.placed:
                shardings[value] = self._sharding(value, self._layout(value))
        for constraint in self._graph.constraints:
            (value,) = constraint.results
            sharding = self._sharding(value, self._layout(value))
            constraint.view.attributes["sharding"] = sharding.to_attr()
        seconds = self._reshard_operands()
        scattered = self._scatter_sums()
        for op in chain.from_iterable(self._graph.ops_of.values()):
            if op.results:
                layouts = scattered.get(op.results[0]) or [self._layout(r) for r in op.results]
                set_op_shardings(op.view, tuple(map(self._sharding, op.results, layouts)))
        for op in self._graph.transparent:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.view.operation.erase()
        for value in reversed(self._graph.free):
            if not list(value.uses):  # All its users need it in other layouts.
                ir.OpResult(value).owner.erase()
        return_copies(self.posed.fragments(), shardings, self._graph.mesh, seconds)

    def _write_seconds(self) -> None:
        """Writes what one run of each fragment takes: also collectives, resharding and its call;
        and its compute split evenly over the devices."""
        graph, batches = self._graph, self.posed.plan.num_micro_batches
        devices, device = graph.mesh.num_devices, graph.cluster.device
        for op, cost in zip(graph.steps, graph.step_seconds(self.choice), strict=True):
            if isinstance(op, mpmd.FragmentOp):
                works = (one.work for one in graph.ops_of[body(op)])
                op.attributes[COMPUTE_SECONDS] = f64(total_seconds(works, device) / devices)
                call = call_seconds(op, batches, graph.cluster, devices)
                op.attributes[SECONDS] = f64(cost / self.posed.runs(op) + call)

    def _reshard_operands(self) -> dict[ir.Value, float]:
        """Brings operands into the layouts that their ops need, before the first user of each.

        A constraint changes the layout of a value. One that is computed in whatever layout is used
        has an op for each.

        Returns the seconds that the problem has for each constraint, by its result: those of all
        nodes that need it.
        """
        graph, choice = self._graph, self.choice
        made: dict[tuple[ir.Value, Layout, ir.Block], ir.Value] = {}
        seconds: dict[ir.Value, float] = {}
        counted: set[tuple[ir.Value, Need]] = set()
        for op, i, need in graph.operand_needs:
            value = op.operands[i]
            wanted = need.layouts[choice[need.node]]
            if self._layout(value) == wanted:
                continue
            key = (value, wanted, op.view.operation.block)
            if key not in made:
                with ir.InsertionPoint(op.view), op.view.location:
                    bring = self._again if value in graph.free else self._constraint
                    made[key] = bring(value, wanted).results[0]
            op.view.operands[i] = made[key]
            if value in graph.placed and (value, need) not in counted:
                counted.add((value, need))
                matrix = graph.need_seconds(value, need)
                spent = float(matrix[choice[graph.placed[value].node], choice[need.node]])
                seconds[made[key]] = seconds.get(made[key], 0.0) + spent
        return seconds

    def _again(self, value: ir.Value, layout: Layout) -> ir.OpView:
        """A copy of a constant's or a broadcast's op that makes it in another layout."""
        copy = ir.OpResult(value).owner.clone().opview
        set_op_shardings(copy, (self._sharding(value, layout),))
        return copy

    def _scatter_sums(self) -> dict[ir.Value, tuple[Layout, ...]]:
        """Writes a reduce-scatter as an all-reduced result that a constraint cuts.

        Returns the layouts that these ops have themselves, by their first result.
        """
        computed: dict[ir.Value, tuple[Layout, ...]] = {}
        for one in self._graph.ops:
            strategy = one.strategy(self.choice)
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

    def _layout(self, value: ir.Value) -> Layout:
        if value not in self._layouts:  # Those of constants with many users take time.
            self._layouts[value] = self._graph.layout_of(value, self.choice)
        return self._layouts[value]

    def _sharding(self, value: ir.Value, layout: Layout) -> Sharding:
        placed = self._graph.placed.get(value)
        type_ = ir.RankedTensorType(value.type if placed is None else placed.type)
        names = self._graph.mesh.axis_names
        return sharding_of(self.posed.name, names, layout, type_.rank)
