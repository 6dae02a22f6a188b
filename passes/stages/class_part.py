"""The sharding problem of one class of layers on one mesh, and the costs of its assignments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import get_args

import numpy as np

from alpa.dialects import body, ir, mpmd
from alpa.dialects.attributes import Part, read_arguments, read_part
from alpa.dialects.plan import Plan
from alpa.dialects.sharding import ShardingRule
from alpa.passes.plan.backward_halves import Halves
from alpa.passes.sharding.copies import local_bytes
from alpa.passes.sharding.liveness import Held, buffer, passing
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.op_seconds import work_seconds
from alpa.passes.sharding.ops import Cache, Op
from alpa.passes.sharding.shard_graph import Placed, ShardGraph
from alpa.passes.sharding.strategies import splittable
from alpa.passes.solve.sharding.problem import Memory, Problem, Usage
from alpa.passes.stages.layer_classes import MESH, LayerClass

_Bytes = dict[tuple[str, int], np.ndarray]
"""Bytes by what they are for and by node, for each of its strategies."""
Factors = dict[tuple[str, tuple[int, ...]], float]
"""Seconds of ops by the part of the step and the sizes of the factors that may be sharded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassPart:
    """A class on a mesh."""

    posed: MeshProblem
    resident: _Bytes
    """bytes that stay, by strategy of a node: "state" once, "activation" per micro-batch"""
    split: _Bytes
    """if the backward is split: "freed" and "made" bytes, by strategy of a node"""
    second: float
    """the share of the backward's seconds that its second part takes"""
    passing: Problem
    """the memory rows of values that do not stay"""
    arguments: list[Placed]
    results: list[Placed]

    @classmethod
    def of(cls, layer: LayerClass, posed: MeshProblem) -> ClassPart:
        """Of a class's program, posed by itself."""
        placed, device = posed.graph.placed, posed.graph.cluster.device
        halves = posed.graph.reader.kept.once(
            ("halves", layer.function), lambda: layer.halves(device)
        )
        resident, split, passing = _memory(layer, posed, halves)
        first, second = (sum(it.seconds[n] for it in halves.values()) for n in (0, 1))
        return cls(
            posed=posed,
            resident=resident,
            split=split,
            second=second / (first + second) if second else 0.0,
            passing=Problem(node_costs=tuple(posed.graph.costs), edges=(), usages=passing),
            arguments=[placed[argument] for argument in body(layer.function).arguments],
            results=[placed[value] for value in layer.returned],
        )

    @property
    def graph(self) -> ShardGraph:
        """The nodes and edges of the class."""
        return self.posed.graph

    def costs(self, choice: Sequence[int]) -> list[float]:
        """What an assignment costs a layer: the rows of `ClassCosts.by_class`."""
        seconds = {"": 0.0, "forward": 0.0, "backward": 0.0, "update": 0.0}
        for step, cost in zip(self.graph.steps, self.graph.step_seconds(choice), strict=True):
            seconds[_part_of(step)] += cost
        kept = {"state": 0.0, "activation": 0.0, "freed": 0.0, "made": 0.0}
        for (kind, node), sizes in (*self.resident.items(), *self.split.items()):
            kept[kind] += float(sizes[choice[node]])
        batches = self.posed.plan.num_micro_batches
        return [
            seconds["forward"] / batches,
            seconds["backward"] / batches,
            seconds["update"],
            kept["state"],
            kept["activation"],
            Memory(self.passing).peak(choice)[0],
            kept["freed"],
            kept["made"],
            self.second * seconds["backward"] / batches,
        ]

    def held(self, placed: Placed, choice: Sequence[int]) -> float:
        """Bytes of a value on each device."""
        sizes = local_bytes(self.graph, placed.layouts, ir.RankedTensorType(placed.type))
        return float(sizes[choice[placed.node]])

    def factors(self) -> Factors:
        """The work of one run of each op that has a sharding rule. Nothing splits the start of a
        kernel, so that has no factors."""
        reader, device = self.graph.reader, self.graph.cluster.device
        parts, known, found = list(map(_part_of, self.graph.steps)), Cache(), Factors()

        def of_kind(op: Op, rule: ShardingRule) -> tuple[tuple[int, ...], float, float]:
            starts = op.work.kernels * device.launch
            return splittable(rule), float(work_seconds(op.work, device)) - starts, starts

        def add(part: str, factors: tuple[int, ...], seconds: float) -> None:
            found[part, factors] = found.get((part, factors), 0.0) + seconds

        for op, rule, weight, step in self.graph.ruled:
            runs = 1 if parts[step] == "update" else self.posed.plan.num_micro_batches
            sizes, seconds, starts = known.once(reader.kind(op), partial(of_kind, op, rule))
            add(parts[step], sizes, weight * seconds / runs)
            add(parts[step], (), weight * starts / runs)
        return found


class Posing:
    """The problem of a class's program, posed as far as it is needed."""

    def __init__(self, layer: LayerClass, graph: ShardGraph, plan: Plan) -> None:
        """Poses nothing yet; what poses raises PassError where an op cannot be on the mesh."""
        bandwidth = graph.cluster.inter_host.between_meshes.bandwidth
        self.layer = layer
        self.problem = MeshProblem(layer.function, MESH, plan, graph, bandwidth, layer.totals)
        self._left = self.problem.pose()
        self._least: dict[tuple[int, float], float] = {}
        """what was found, by the number of fragments and how close it is"""

    @cached_property
    def part(self) -> ClassPart:
        """The class on the mesh."""
        return ClassPart.of(self.layer, self.whole())

    def whole(self) -> MeshProblem:
        """The whole problem."""
        for _ in self._left:
            pass
        return self.problem

    def until(self, part: Part) -> None:
        """Poses each part up to `part`."""
        for _ in islice(self._left, max(0, self._count(part) - len(self.problem.fragments()))):
            pass

    def _count(self, part: Part) -> int:
        """The number of fragments of the parts up to `part`."""
        parts = get_args(Part)[: get_args(Part).index(part) + 1]
        fragments = [o for o in body(self.layer.function).operations if _is_fragment(o)]
        return sum(read_part(fragment) in parts for fragment in fragments)

    def least_seconds(self, part: Part, close: float) -> float:
        """What a run of each part up to `part` takes at least in all, whatever their shardings and
        whatever the parts behind them need: a bound by dual ascent, which ends where it gains less
        than `close`.

        Where more parts are posed than it needs, it poses its own anew.
        """
        count = self._count(part)
        if (count, close) not in self._least:
            self._least[count, close] = self._bound(part, count, close)
        return self._least[count, close]

    def _bound(self, part: Part, count: int, close: float) -> float:
        """`least_seconds` of a part that ends with so many fragments."""
        graph, plan = self.problem.graph, self.problem.plan
        batches = plan.num_micro_batches
        if count < len(self.problem.fragments()):
            anew = ShardGraph(graph.mesh, graph.cluster, graph.reader, graph.cache)
            return Posing(self.layer, anew, plan).least_seconds(part, close)
        self.until(part)
        if not count or not np.isfinite(np.concatenate(graph.costs)).all():
            return 0.0
        from alpa.passes.solve.sharding import bound  # noqa: PLC0415 - costs start-up time

        problem = Problem(node_costs=tuple(graph.costs), edges=graph.terms.edge_list(), usages=())
        found = bound.least(problem, near=batches * close)
        # What storing the arguments costs is no part of a run.
        stored = sum(float(one.costs.max()) for one in graph.charges if one.step == 0)
        return max(0.0, found - stored) / batches


def _memory(
    layer: LayerClass, posed: MeshProblem, halves: Mapping[mpmd.FragmentOp, Halves]
) -> tuple[_Bytes, _Bytes, tuple[Usage, ...]]:
    """The bytes that stay, those of a split backward, and the usages of values that do not stay."""
    graph, batches, fragments = posed.graph, posed.plan.num_micro_batches, posed.fragments()
    resident, split = _Bytes(), _Bytes()

    def stays(kind: str, value: ir.Value, copies: int = 1, of: _Bytes = resident) -> None:
        placed = graph.placed[value]
        more = local_bytes(graph, placed.layouts, ir.RankedTensorType(placed.type), copies)
        of[kind, placed.node] = of.get((kind, placed.node), 0.0) + more

    arguments = zip(body(layer.function).arguments, read_arguments(layer.function), strict=True)
    for number, (value, argument) in enumerate(arguments):
        if number in layer.kept:
            stays("activation", value)
        elif number not in layer.boundary:
            stays("state", value, batches if argument.role == "batch" else 1)
    made = {r for f in fragments if read_part(f) == "forward" for r in f.results}
    read = {v for f in fragments if read_part(f) == "update" for v in f.operands}
    read |= {layer.returned[r] for r in layer.totals}
    for fragment in fragments:
        if read_part(fragment) == "backward":
            for value in fragment.operands:
                if value in made:
                    stays("activation", value)
            for value in fragment.results:
                if value in read and batches > 1:
                    stays("state", value)
    inputs = list(body(layer.function).arguments)
    kept = {inputs[number] for number in layer.kept}
    behind = {inputs[number] for number in layer.boundary - layer.kept}
    for fragment, its in halves.items():
        for number, value in enumerate(fragment.operands):
            is_read = number in its.read
            if not is_read and (value in made or value in kept):
                stays("freed", value, of=split)
            elif is_read and value in behind:
                stays("made", value, of=split)
        for value, rows in its.made:
            if value in graph.placed:
                stays("made", value, rows, of=split)
    made_here = {
        inner
        for fragment in fragments
        for inner, value in zip(body(fragment).arguments, fragment.operands, strict=True)
        if value in behind or (value in kept and read_part(fragment) == "forward")
    }
    rows = [
        *passing(graph, posed.clock, made_here=made_here),
        *_cotangents(posed, behind),
    ]
    return resident, split, tuple(row.usage for row in rows)


def _cotangents(posed: MeshProblem, behind: Collection[ir.Value]) -> Iterator[Held]:
    """What the layer behind hands to a backward part: it goes when it has been read."""
    clock = posed.clock
    for fragment, (start, _) in clock.spans.items():
        if read_part(fragment) == "backward":
            pairs = zip(body(fragment).arguments, fragment.operands, strict=True)
            for inner, value in pairs:
                if value in behind:
                    span = start, clock.until.get(inner, start)
                    yield from buffer(posed.graph, "temporaries", inner, span)


def _is_fragment(op: ir.OpView) -> bool:
    return isinstance(op, mpmd.FragmentOp)


def _part_of(step: ir.OpView | None) -> str:
    """The part of the training step that a step of a graph adds; empty for the arguments."""
    return read_part(step) or "" if isinstance(step, mpmd.FragmentOp) else ""
