"""Solves for what equal layers cost on a mesh once they are sharded: the numbers behind t_intra.

For one logical mesh, the sharding problems of all classes of layers (`layer_classes.py`) and the
resharding between them are one integer linear program, in which equal layers take equal choices.
It is as large as one layer of each class, however many layers there are. Its choice gives each
layer's seconds and bytes, and each link's seconds; a stage is a sum of these. What a stage could
save at its ends, where nothing needs to match a neighbour, is left out: the sum is what some choice
really costs.

Where a baseline restricts what is done inside a mesh, it restricts these problems as well
(`sharding/baselines.py`). For `heuristic`, which begins at the arguments of the program, what a
layer reads from others is taken for an argument: there the costs are an estimate.

A price per byte that stays (states, gradient accumulators, activations in flight) makes the same
program find choices that hold less: higher prices give slower, smaller stages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from alpa.dialects import body, ir, mpmd, sdy
from alpa.dialects.attributes import Plan, read_arguments, read_part
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.baselines import Intra, restrict
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.copies import LocalBytes
from alpa.passes.sharding.fold import fold, unfold
from alpa.passes.sharding.liveness import Residence, held
from alpa.passes.sharding.mesh_part import MeshPart
from alpa.passes.sharding.op_seconds import op_seconds
from alpa.passes.sharding.rules import populated
from alpa.passes.sharding.shard_graph import Known, Placed, RuleOf, ShardGraph
from alpa.passes.sharding.step_costs import Snapshot, step_costs
from alpa.passes.sharding.strategies import splittable
from alpa.passes.sharding.versions import Versions
from alpa.passes.solve.sharding.problem import Edge, Memory, Problem, Usage
from alpa.passes.stages.class_batches import class_batches
from alpa.passes.stages.class_costs import ClassCosts, Work
from alpa.passes.stages.exchange import Exchange
from alpa.passes.stages.layer_classes import MESH, LayerClass, LayerClasses, Link, returned

GAP = 3e-2
"""Costs of stages are proven this well: what is chosen is solved again, exactly."""
RADIUS = 2
"""Of folding: GPT-39B's fastest choices cost 0.1 % more than at the radius that is used there."""
TIME_LIMIT = 30.0
"""Seconds for each mesh and price; what is found by then is a choice, too. An idle core needs a
tenth: where time ends the search, the stages depend on how busy the machine is."""

_ONE = Versions(mesh=MESH, kept={MESH: 1})
"""What stays for each micro-batch in flight is told apart: the stage decides how many there are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Resident:
    """Bytes that stay, by strategy of a node: `kind` "state" once, "activation" per micro-batch."""

    kind: str
    node: int
    bytes: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """A graph when a fragment of this part of the step has just been added."""

    part: str
    costs: Snapshot
    ruled: int
    """how many ops of it have a sharding rule"""

    @classmethod
    def of(cls, graph: ShardGraph, part: str) -> _Step:
        return cls(part=part, costs=Snapshot.of(graph), ruled=len(graph.ruled))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """The sharding problem of one class on one mesh, as far as it is built after each fragment."""

    graph: ShardGraph
    steps: list[_Step]
    """after the arguments, which are of no part, each fragment, and what a baseline forbids"""
    resident: list[_Resident]
    passing: tuple[Usage, ...]
    arguments: list[Placed]
    results: list[Placed]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassSolver:
    """Costs of all classes on any logical mesh. Made by `class_solver`."""

    classes: LayerClasses
    cluster: Cluster
    plan: Plan
    rules: tuple[RuleOf, ...]
    intra: Intra
    batches: tuple[BatchDims, ...] | None
    """of the classes' programs; None where the whole space is searched"""

    @cached_property
    def exchange(self) -> Exchange:
        """What stages of the classes' layers exchange."""
        return Exchange.of(self.classes)

    def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
        """The problem of a mesh. Raises PassError where an op cannot be on it."""
        mesh = LogicalMesh.of(self.cluster, hosts, devices, shape)
        known = Known()
        parts = [
            _part(layer, mesh, self.cluster, self.plan, rule_of, known, self._restriction(number))
            for number, (layer, rule_of) in enumerate(
                zip(self.classes.classes, self.rules, strict=True)
            )
        ]
        return ClassProblem.of(self, parts)

    def _restriction(self, number: int) -> Callable[[MeshPart], None] | None:
        """What takes strategies away from the problem of a class, if anything does."""
        if self.batches is None:
            return None
        batch = self.batches[number]
        return lambda part: restrict(part.graph, self.intra, batch, part.tensors())


@contextmanager
def class_solver(
    classes: LayerClasses,
    cluster: Cluster,
    plan: Plan,
    intra: Intra = "auto",
) -> Generator[ClassSolver]:
    """The classes' programs with their sharding rules, which are gone at the end."""
    with ExitStack() as stack:
        rules = tuple(stack.enter_context(populated(layer.module)) for layer in classes.classes)
        yield solver_of(classes, cluster, plan, intra, rules)


def solver_of(
    classes: LayerClasses, cluster: Cluster, plan: Plan, intra: Intra, rules: tuple[RuleOf, ...]
) -> ClassSolver:
    """For programs that have their sharding rules."""
    return ClassSolver(
        classes=classes,
        cluster=cluster,
        plan=plan,
        rules=rules,
        intra=intra,
        batches=None if intra == "auto" else class_batches(classes, rules),
    )


def _part(
    layer: LayerClass,
    mesh: LogicalMesh,
    cluster: Cluster,
    plan: Plan,
    rule_of: RuleOf,
    known: Known,
    restriction: Callable[[MeshPart], None] | None,
) -> _Part:
    graph = ShardGraph(mesh, cluster, rule_of, lambda _location, _text: None, known)
    built = MeshPart(
        layer.function, MESH, plan, graph, cluster.inter_host.bandwidth, _ONE, layer.totals
    )
    given = {c.result for c in _constraints(layer)}
    steps = [
        _Step.of(graph, "" if fragment is None else read_part(fragment) or "")
        for fragment in built.build_in_steps()
    ]
    if restriction is not None:
        restriction(built)
        steps.append(_Step.of(graph, ""))
    block = body(layer.function)
    arguments = [graph.placed[argument] for argument in block.arguments]
    results = [graph.placed[value] for value in returned(layer)]
    resident, passing = _memory(layer, built, plan)
    # Sums that updates begin with were made for this mesh: the next one makes its own.
    for constraint in _constraints(layer):
        if constraint.result not in given:
            constraint.result.replace_all_uses_with(constraint.operands[0])
            constraint.operation.erase()
    return _Part(
        graph=graph,
        steps=steps,
        resident=resident,
        passing=passing,
        arguments=arguments,
        results=results,
    )


def _constraints(layer: LayerClass) -> list[sdy.ShardingConstraintOp]:
    return [
        op
        for fragment in body(layer.function).operations
        if isinstance(fragment, mpmd.FragmentOp)
        for op in body(fragment).operations
        if isinstance(op, sdy.ShardingConstraintOp)
    ]


def _memory(
    layer: LayerClass, built: MeshPart, plan: Plan
) -> tuple[list[_Resident], tuple[Usage, ...]]:
    """What stays, and the usages of what does not."""
    graph, block = built.graph, body(layer.function)
    sizes = LocalBytes(graph)
    attributes = read_arguments(layer.function)
    values = list(block.arguments)
    resident: list[_Resident] = []

    def stays(kind: str, value: ir.Value, copies: int = 1) -> None:
        placed = graph.placed[value]
        held = sizes.of(placed.layouts, ir.RankedTensorType(placed.type), copies)
        resident.append(_Resident(kind=kind, node=placed.node, bytes=held))

    fragments = built.fragments()
    elsewhere = [returned(layer)[r] for r in layer.totals]
    for number, (value, argument) in enumerate(zip(values, attributes, strict=True)):
        if number not in layer.boundary:
            stays("state", value, plan.num_micro_batches if argument.role == "batch" else 1)
    for number in layer.kept:
        stays("activation", values[number])
    made = {r for f in fragments if read_part(f) == "forward" for r in f.results}
    for fragment in fragments:
        part = read_part(fragment)
        if part == "backward":
            for value in fragment.operands:
                if value in made:
                    stays("activation", value)
            if plan.num_micro_batches > 1:
                updates = [f for f in fragments if read_part(f) == "update"]
                read = {v for f in updates for v in f.operands} | set(elsewhere)
                for value in fragment.results:
                    if value in read:
                        stays("state", value)
    rows = held(
        graph,
        [],
        fragments,
        [],
        Residence(num_micro_batches=1, versions=_ONE, donated=frozenset()),
    )
    passing = tuple(row.usage for row in rows if row.kind in ("temporaries", "copies"))
    return resident, passing


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassProblem:
    """All classes on one mesh: node v of class c is node `offset[c] + v`. Made by `ClassSolver`."""

    solver: ClassSolver
    parts: list[_Part]
    offset: list[int]
    links: dict[Link, tuple[int, int, np.ndarray]]
    """ends, and seconds of one crossing; ends may be equal"""

    @classmethod
    def of(cls, solver: ClassSolver, parts: list[_Part]) -> ClassProblem:
        offset = np.cumsum([0, *(len(part.graph.costs) for part in parts)]).tolist()
        links: dict[Link, tuple[int, int, np.ndarray]] = {}
        for link in solver.classes.links:
            reader, producer = parts[link.reader], parts[link.producer]
            source, target = producer.results[link.result], reader.arguments[link.argument]
            matrix = reader.graph.reshard_seconds(source.layouts, target.layouts, target.type)
            ends = offset[link.producer] + source.node, offset[link.reader] + target.node
            links[link] = (*ends, matrix)
        return cls(solver=solver, parts=parts, offset=offset, links=links)

    def solve(self, prices: Sequence[float], enough: float = inf) -> list[ClassCosts]:
        """The costs of the fastest choice, and of the best one for each price of a device's memory.

        Where a step takes more than `enough` seconds whatever the choice, one of them alone.
        Raises InfeasibleError, TimeoutError or SolverFailedError where none was found.
        """
        from alpa.passes.solve.sharding import pareto  # noqa: PLC0415 - costs start-up time

        # What is alike in different classes is tied as it would be in the whole program.
        small, node_class = fold(self._problem(), RADIUS, like=self._problem(each_once=True))
        found = pareto.solve(small, prices, gap=GAP, time_limit=TIME_LIMIT, enough=enough)
        return [self._costs(unfold(choice, node_class)) for choice in found]

    def work(self, costs: ClassCosts) -> Work:
        """What is done, of a problem of one device and its costs."""
        by_factors: list[dict[tuple[str, tuple[int, ...]], float]] = []
        for part in self.parts:
            mine: dict[tuple[str, tuple[int, ...]], float] = {}
            for before, step in pairwise(part.steps):
                runs = 1 if step.part == "update" else self._micro_batches
                for op, rule, weight in part.graph.ruled[before.ruled : step.ruled]:
                    key = (step.part, splittable(rule))
                    seconds = weight * op_seconds(op.view, self.solver.cluster) / runs
                    mine[key] = mine.get(key, 0.0) + seconds
            by_factors.append(mine)
        return Work(costs=costs, by_factors=by_factors)

    @property
    def _micro_batches(self) -> int:
        return self.solver.plan.num_micro_batches

    def _problem(self, *, each_once: bool = False) -> Problem:
        """All layers, or one of each class and of each kind of link."""
        costs: list[np.ndarray] = []
        held: dict[int, np.ndarray] = {}
        edges: dict[tuple[int, int], np.ndarray] = {}
        for number, part in enumerate(self.parts):
            count = 1 if each_once else len(self.solver.classes.classes[number].layers)
            whole = part.steps[-1].costs
            costs += [count * node for node in whole.nodes]
            for one in part.resident:
                at = self.offset[number] + one.node
                held[at] = held.get(at, 0.0) + count * one.bytes
            for (a, b), matrix in whole.edges.items():
                edges[self.offset[number] + a, self.offset[number] + b] = count * matrix
        for link, (source, target, matrix) in self.links.items():
            count = 1 if each_once else len(self.solver.classes.links[link])
            weight = count * self._weight(link)
            if source == target:
                costs[source] = costs[source] + weight * np.diagonal(matrix)
                continue
            if source > target:
                source, target, matrix = target, source, matrix.T
            old = edges.get((source, target))
            edges[source, target] = weight * matrix if old is None else old + weight * matrix
        return Problem(
            node_costs=tuple(costs),
            edges=tuple(Edge(a, b, matrix) for (a, b), matrix in edges.items()),
            usages=tuple(
                Usage(nodes=(at,), bytes=size, start=0, stop=1) for at, size in held.items()
            ),
            memory_limit=float(self.solver.cluster.device.memory),
        )

    def _weight(self, link: Link) -> int:
        return 1 if link.part == "update" else self._micro_batches

    def _costs(self, choice: Sequence[int]) -> ClassCosts:
        """What a choice costs, class by class."""
        rows = [
            self._class_costs(part, choice[self.offset[c] : self.offset[c + 1]])
            for c, part in enumerate(self.parts)
        ]
        forward, backward, update, state, activation, transient = np.array(rows).T
        links = {
            link: float(matrix[choice[source], choice[target]])
            for link, (source, target, matrix) in self.links.items()
        }
        # The one that is made while the one before is on its way (`sharding/versions.py`).
        versions = min(2, self._micro_batches)
        return ClassCosts(
            forward=forward,
            backward=backward,
            update=update,
            state=state,
            activation=activation,
            transient=transient,
            links=links,
            sent={
                (c, r): versions * self._held(c, self.parts[c].results[r], choice)
                for c, r in self.solver.exchange.sent
            },
            received={
                (c, a): self._held(c, self.parts[c].arguments[a], choice)
                for c, a in self.solver.exchange.received
            },
        )

    def _held(self, number: int, placed: Placed, choice: Sequence[int]) -> float:
        """Bytes of a value of a class on each device."""
        sizes = LocalBytes(self.parts[number].graph)
        held = sizes.of(placed.layouts, ir.RankedTensorType(placed.type))
        return float(held[choice[self.offset[number] + placed.node]])

    def _class_costs(self, part: _Part, choice: Sequence[int]) -> list[float]:
        seconds = {"": 0.0, "forward": 0.0, "backward": 0.0, "update": 0.0}
        costs = step_costs([step.costs for step in part.steps], choice)
        for step, cost in zip(part.steps, costs, strict=True):
            seconds[step.part] += cost
        kept = {"state": 0.0, "activation": 0.0}
        for one in part.resident:
            kept[one.kind] += float(one.bytes[choice[one.node]])
        rows = Problem(node_costs=tuple(part.graph.costs), edges=(), usages=part.passing)
        transient = Memory(rows).peak(choice)[0]
        return [
            seconds["forward"] / self._micro_batches,
            seconds["backward"] / self._micro_batches,
            seconds["update"],
            kept["state"],
            kept["activation"],
            transient,
        ]
