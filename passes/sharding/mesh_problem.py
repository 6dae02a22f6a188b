"""The sharding problem of one mesh: what of a planned program lives on it, posed from the IR alone.

* An argument of @main and the landing place of a transfer is a node whose strategies are its
  layouts. What is returned as a state takes the layout of that state's argument.
* Fragments are added op by op (`op_poser.py`).
* The memory rows are in `liveness.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

from alpa.dialects import body, func, ir, mpmd, terminator, walk
from alpa.dialects.attributes import (
    Argument,
    State,
    argument_state,
    read_arguments,
    read_part,
    read_results,
)
from alpa.dialects.mpmd_types import MeshTensor, mesh_of, read_topology
from alpa.dialects.plan import MeshAssignment, Plan, SolverReport
from alpa.passes.base import NoRoomError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Device, size_text
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.accumulation import accumulation_seconds, is_accumulated
from alpa.passes.sharding.baselines import Intra, StateKind, Tensors
from alpa.passes.sharding.copies import charge_storage, local_bytes
from alpa.passes.sharding.gradient_reductions import is_placed, reduced_later
from alpa.passes.sharding.liveness import Clock, Held, buffer, passing
from alpa.passes.sharding.op_poser import OpPoser
from alpa.passes.sharding.ops import Cache, OpReader
from alpa.passes.sharding.padding import is_even
from alpa.passes.sharding.rules import RuleOf
from alpa.passes.sharding.shard_graph import Placed, ShardGraph
from alpa.passes.sharding.versions import Versions
from alpa.passes.solve.sharding.problem import (
    OutOfMemoryError,
    Problem,
    Solution,
    with_edges_of_usages,
)


@dataclass(frozen=True, eq=False)
class Shared:
    """What the problems of a program share: those of its classes of layers, and of its meshes."""

    _kinds: Cache = field(default_factory=Cache)
    _caches: Cache = field(default_factory=Cache)

    def reader(self, device: Device, rule_of: RuleOf) -> OpReader:
        """A reader that has read nothing."""
        return OpReader(device, rule_of, self._kinds)

    def graph(self, mesh: LogicalMesh, cluster: Cluster, reader: OpReader) -> ShardGraph:
        """An empty graph; those of equal meshes have one cache."""
        return ShardGraph(mesh, cluster, reader, self._caches.once((mesh, cluster), Cache))


@dataclass(frozen=True)
class MeshProblem:
    """What of @main lives on one mesh, and its sharding problem. Made by `of` or `posed`."""

    function: func.FuncOp
    name: str
    plan: Plan
    graph: ShardGraph
    landing_bandwidth: float
    """bytes per second and device of what transfers bring"""
    totals: frozenset[int] = frozenset()
    """results of @main that are gradients, read as sums over the micro-batches"""
    _states: dict[State, Placed] = field(default_factory=dict[State, Placed])
    """the arguments on this mesh, by state"""

    @classmethod
    def of(
        cls,
        function: func.FuncOp,
        assignment: MeshAssignment,
        cluster: Cluster,
        plan: Plan,
        rule_of: RuleOf,
        shared: Shared | None = None,
    ) -> Self:
        """The problem of one of a planned program's meshes.

        Args:
            function: the program.
            assignment: the mesh.
            cluster: its kind of hosts.
            plan: the micro-batches and the schedule.
            rule_of: gives the sharding rules of ops.
            shared: what the problems of all meshes of a program share.

        Raises:
            PassError: an op cannot be on the mesh.
        """
        shape, hosts = assignment.logical_shape, len(assignment.hosts)
        devices = len(assignment.devices) // hosts
        names = tuple(axis for axis, _ in read_topology(function)[assignment.name].axes)
        mesh = LogicalMesh.of(cluster, hosts, devices, shape, names)
        bandwidth = cluster.intra_host.between_meshes.bandwidth
        if cluster.hosts > 1:
            bandwidth = min(bandwidth, cluster.inter_host.between_meshes.bandwidth / devices)
        shared = shared or Shared()
        graph = shared.graph(mesh, cluster, shared.reader(cluster.device, rule_of))
        return cls(function, assignment.name, plan, graph, bandwidth).posed()

    def posed(self) -> Self:
        """Adds the arguments to the graph, then transfers and fragments in program order."""
        for _ in self.pose():
            pass
        return self

    def pose(self) -> Iterator[ir.OpView]:
        """As `posed`, one transfer or fragment at a time, which is given when it was added."""
        block, graph = body(self.function), self.graph
        graph.steps.append(None)
        for number, (argument, attributes) in enumerate(
            zip(block.arguments, self._arguments, strict=True)
        ):
            tensor = MeshTensor.from_type(argument.type)
            if tensor.mesh == self.name:
                placed = graph.add_tensor(argument, tensor.type, given=tensor.sharding)
                charge_storage(graph, placed)
                self._states[argument_state(number, attributes)] = placed
        for op in block.operations:
            if isinstance(op, mpmd.TransferOp):
                self._add_transfer(op)
                yield op
            elif isinstance(op, mpmd.FragmentOp) and mesh_of(op) == self.name:
                self._add_fragment(op)
                yield op

    @cached_property
    def clock(self) -> Clock:
        """When the fragments run, and their values live."""
        return self.graph.reader.kept.once(
            ("clock", self.function, self.name), lambda: Clock.of(self.graph)
        )

    @cached_property
    def versions(self) -> Versions:
        """Those of the values that fragments exchange."""
        return Versions.on(self.name, self.function, self.plan)

    @cached_property
    def usages(self) -> list[Held]:
        """What this mesh holds when (`sharding/liveness.py`)."""
        spans, end, versions = self.clock.spans, self.clock.now, self.versions
        batches, whole = self.plan.num_micro_batches, self.clock.micro_batch
        first = {v: start for op, (start, _) in reversed(spans.items()) for v in op.operands}
        last = {v: stop for op, (_, stop) in spans.items() for v in op.operands}
        rows, found = partial(buffer, self.graph), list[Held]()
        for value, attributes in zip(body(self.function).arguments, self._arguments, strict=True):
            if attributes.role == "batch":
                stop = end if batches > 1 else last.get(value, end)
                found += rows("inputs", value, (0, stop), batches)
            else:
                found += rows("states", value, (0, end))
        for op in self.graph.steps:
            if isinstance(op, mpmd.TransferOp):
                (value,) = op.results
                span = (max(0, first.get(value, end) - 1), last.get(value, end))
                found += rows("activations", value, *versions.lives(value, span, whole))
        elsewhere = self._donated()
        for op, (start, stop) in spans.items():
            kind = "activations" if read_part(op) == "forward" else "gradients"
            for result in op.results:
                if result in elsewhere:
                    continue
                sum_type = self._sums.get(result)
                is_gradient = batches > 1 and read_part(op) == "backward"
                if is_gradient or sum_type is not None:  # It is added to an accumulator.
                    copies = 1 if sum_type is not None else versions.of_gradient(result)
                    found += rows(kind, result, (0, end), copies, sum_type)
                if is_gradient:
                    elsewhere.add(result)
                elif sum_type is None:
                    span = (start, last.get(result, end))
                    found += rows(kind, result, *versions.lives(result, span, whole))
                else:
                    copies = versions.of(result) if result in last else 1
                    found += rows(kind, result, (start, last.get(result, stop)), copies)
        return [*found, *passing(self.graph, self.clock, elsewhere)]

    @cached_property
    def problem(self) -> Problem:
        """The problem to solve. The graph stays as it is from then on."""
        return with_edges_of_usages(
            Problem(
                node_costs=tuple(self.graph.costs),
                edges=self.graph.terms.edge_list(),
                usages=tuple(one.usage for one in self.usages),
                memory_limit=float(self.graph.cluster.device.memory),
            )
        )

    def fragments(self) -> list[mpmd.FragmentOp]:
        """The fragments on this mesh, in program order."""
        return [op for op in self.graph.steps if isinstance(op, mpmd.FragmentOp)]

    def runs(self, fragment: mpmd.FragmentOp) -> int:
        """How often a fragment runs in a training step."""
        return 1 if read_part(fragment) == "update" else self.plan.num_micro_batches

    def out_of_memory(self, error: OutOfMemoryError) -> NoRoomError:
        """A located error with what is needed, where, of what kind, and what would help."""
        device = self.graph.cluster.device
        least: dict[str, float] = {}
        for one in self.usages:
            if one.usage.start <= error.time < one.usage.stop:
                least[one.kind] = least.get(one.kind, 0.0) + float(one.usage.bytes.min())
        kinds = ", ".join(
            f"{kind} {size_text(size)}"
            for kind, size in sorted(least.items(), key=lambda item: -item[1])
            if size > 0
        )
        if self._state_results and not self._donated():
            kinds += ", with new states beside the old ones (donate-states=true overwrites these)"
        return NoRoomError(
            self.clock.op_at(error.time),
            f"needs at least {size_text(error.needed)} per device on {self.name}, {device.name} "
            f"has {size_text(error.limit)}; here, cut as finely as can be: {kinds}; raise the "
            "number of micro-batches so that each is smaller, keep fewer of them in flight "
            "(1f1b), add devices, or let stage-mesh-partition cut other stages with a larger "
            "reserve",
            missing=error.needed / error.limit - 1,
        )

    def report(
        self, intra: Intra, solution: Solution, *, is_whole: bool, folded: Solution | None
    ) -> SolverReport:
        """What is proven about a solution of the whole problem, or of the folded one.

        Args:
            folded: the solution in which equal layers are alike, if there are equal layers.
        """
        return SolverReport(
            mesh=self.name,
            intra=intra,
            status=solution.status,
            objective=solution.objective,
            bound=solution.bound,
            variables=solution.variables,
            peak_bytes=round(solution.peak_bytes),
            problem="whole" if is_whole else "folded",
            folded_objective=None if folded is None else folded.objective,
            folded_bound=None if folded is None else folded.bound,
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
                parts = {
                    read_part(use.owner)
                    for use in argument.uses
                    if isinstance(use.owner, mpmd.FragmentOp)
                }
                states[argument] = "optimizer" if parts == {"update"} else "parameter"
        updates = {
            result
            for op in self.fragments()
            if read_part(op) == "update"
            for inner in walk(body(op))
            for result in inner.results
        }
        return Tensors(states=states, arguments=tuple(mine), updates=frozenset(updates))

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

    def _donated(self) -> set[ir.Value]:
        """The new values of states that take the place of the old ones."""
        old = {
            argument_state(number, attributes)
            for number, attributes in enumerate(self._arguments)
            if attributes.donor or attributes.aliasing_output is not None
        }
        return {value for value, states in self._state_results.items() if old & {*states}}

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

    def _evened(self, inner: ir.Value, outer: ir.Value) -> Placed | None:
        """A node with the even layouts of a fragment's result; None if it has no others."""
        layouts, sizes, type_ = self.graph.placed[inner].layouts, self.graph.mesh.sizes, inner.type
        if not isinstance(type_, ir.RankedTensorType):
            return None

        def even() -> list[Layout]:
            shape = tuple(type_.shape)
            return [layout for layout in layouts if is_even(shape, sizes, layout)]

        found = self.graph.cache.once(("even", layouts, type_), even)
        if len(found) == len(layouts):
            return None
        partial = list(dict.fromkeys(layout for layout in found if len(layout) > type_.rank))
        return self.graph.add_tensor(outer, type_, partial=partial)

    def _state_argument(self, value: ir.Value) -> Placed | None:
        """The argument on this mesh whose layout a returned state has to take."""
        states = self._state_results.get(value, ())
        mine = [self._states[state] for state in states if state in self._states]
        for other in mine[1:]:
            self.graph.forbid_other_layouts(mine[0], other)
        return mine[0] if mine else None

    def _add_transfer(self, op: mpmd.TransferOp) -> None:
        (result,) = op.results
        tensor = MeshTensor.from_type(result.type)
        if tensor.mesh != self.name:
            return
        self.graph.steps.append(op)
        state = self._state_argument(result)
        if state is not None:
            self.graph.placed[result] = state
            return
        # What lands sharded crosses the slow links once; the consumer gathers over fast ones.
        placed = self.graph.add_tensor(result, tensor.type, open=False)
        size = local_bytes(self.graph, placed.layouts, tensor.type)
        times = 1 if _crosses_once(result) else self.plan.num_micro_batches
        self.graph.charge((placed.node,), times * (size / self.landing_bandwidth))

    def _add_fragment(self, op: mpmd.FragmentOp) -> None:
        self.graph.steps.append(op)
        weight, block, placed = self.runs(op), body(op), self.graph.placed
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            placed[argument] = placed[operand]
        unplaced = sum(placed[arg].has_sums and not is_placed(arg) for arg in block.arguments)
        if unplaced:
            message = (
                f"gradients that each reader reduces by itself: {unplaced}; run "
                "place-gradient-reductions before this pass to reduce each of them once"
            )
            self.graph.remarks.append((op.location, message))
        batches, is_backward = self.plan.num_micro_batches, read_part(op) == "backward"
        later = reduced_later(op, batches, self.totals) if is_backward else []
        counts_sums = (
            is_backward and batches > 1 and self.graph.cluster.device.efficiency is not None
        )
        reader = self.graph.reader
        poser = OpPoser(self.graph, reader.deferrable(block, later))
        poser.add_block(block, weight)
        end = reader.end(block)
        for i, (inner, outer) in enumerate(zip(end.operands, op.results, strict=True)):
            wanted = self._state_argument(outer)
            if wanted is None and inner in self.graph.free:
                wanted = self.graph.add_tensor(outer, inner.type)
            if wanted is None:
                wanted = self._evened(inner, outer)
            if wanted is None:
                placed[outer] = placed[inner].closed
            else:
                placed[outer] = wanted.closed
                self.graph.need_operand(end, i, wanted.need, weight)
            if counts_sums and is_accumulated(outer, self.totals):
                seconds = accumulation_seconds(self.graph, placed[outer], inner)
                self.graph.charge((placed[outer].node,), weight * seconds)


def _crosses_once(value: ir.Value) -> bool:
    """Whether only updates read what a transfer brings: then it is a sum over micro-batches."""
    users = [use.owner for use in value.uses]
    return all(isinstance(op, mpmd.FragmentOp) and read_part(op) == "update" for op in users)
