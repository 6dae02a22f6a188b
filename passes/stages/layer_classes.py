"""Classes of equal layers: each class is costed once, as a small program of its own.

Layers are equal if their computations have the same ops, the same types, and operands of the same
kind. The program of a class holds the computations of its first layer, on one mesh. Values from
other layers are its arguments, values for other layers its results. A chain of layers is thus a
chain of classes and the `Link`s between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, cast

from alpa.dialects import body, bytecode, func, ir, mpmd, parse, terminator
from alpa.dialects.attributes import (
    Argument,
    Part,
    Result,
    ResultRole,
    read_arguments,
    read_part,
    read_results,
    state_pairs,
)
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import MeshAssignment, Plan
from alpa.dialects.sharding import Sharding
from alpa.passes.analysis.graph import Graph, block_recipe, inner_blocks
from alpa.passes.analysis.op_work import Work
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Device
from alpa.passes.plan.backward_halves import Halves, halves
from alpa.passes.sharding.gradient_reductions import place_reductions
from alpa.passes.sharding.mesh_problem import Shared
from alpa.passes.sharding.ops import Cache, OpReader
from alpa.passes.sharding.rules import populate, rule_of
from alpa.passes.sharding.user_shardings import UserShardings
from alpa.passes.stages.merge import FragmentBuilder, Stages, totals_of

MESH = "mesh_0"
"""the mesh of all programs of classes"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A value that a layer of one class reads from a layer of another.

    `result` numbers the producer's program's results, `argument` the reader's arguments.
    """

    producer: int
    result: int
    reader: int
    argument: int
    part: Part
    """of the reader's computation that reads it"""


@dataclass(frozen=True, eq=False)
class LayerClass:
    """Equal layers and the program of one of them.

    `boundary` numbers the program's arguments that other layers make.
    """

    function: func.FuncOp
    layers: tuple[int, ...]
    boundary: frozenset[int]
    kept: frozenset[int]
    """boundary arguments that another layer's forward part makes and this one's backward reads"""
    stays: frozenset[int]
    """the program's results that its own forward part makes and its backward reads"""
    totals: frozenset[int]
    """the program's results that are gradients for updates of other layers, which read them as sums
    over the micro-batches"""

    @property
    def returned(self) -> list[ir.Value]:
        """The values that the program returns."""
        return list(terminator(body(self.function)).operands)

    def halves(self, device: Device) -> dict[mpmd.FragmentOp, Halves]:
        """What the parts of its backward fragments hold and take, if they are split."""
        arguments = read_arguments(self.function)
        states = {
            value
            for value, argument in zip(body(self.function).arguments, arguments, strict=True)
            if argument.role == "state"
        }
        returned = {value for r, value in enumerate(self.returned) if r not in self.totals}
        found: dict[mpmd.FragmentOp, Halves] = {}
        for op in body(self.function).operations:
            if isinstance(op, mpmd.FragmentOp) and read_part(op) == "backward":
                leaving = [n for n, value in enumerate(op.results) if value in returned]
                inside = {n for n, value in enumerate(op.operands) if value in states}
                found[op] = halves(op, leaving, inside, device)
        return found

    def has_program_of(self, other: LayerClass) -> bool:
        """Whether both programs compute the same of the same arguments, for the same readers."""
        return self._ends == other._ends and (
            block_recipe(body(self.function)) == block_recipe(body(other.function))
        )

    @cached_property
    def _ends(self) -> Hashable:
        """What a program has besides its ops, and their number. Where arguments come from is left
        out."""
        arguments = [replace(it, input=None) for it in read_arguments(self.function)]
        facts = self.boundary, self.kept, self.stays, self.totals
        ops = [len(block.operations) for block in fragment_blocks(self)]
        return *facts, *arguments, *read_results(self.function), *ops


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerClasses:
    """All layers by class, the module of their programs, and the linked layers: pairs (producer,
    reader) per link.

    The ops have their sharding rules. Pickled, the programs are bytecode, which is read in the
    context that is entered, or in a fresh one.
    """

    module: ir.Module
    classes: tuple[LayerClass, ...]
    class_of: tuple[int, ...]
    links: dict[Link, tuple[tuple[int, int], ...]]
    axis_names: tuple[str, ...] | None = None
    """of all meshes, if the program's own shardings name them"""
    shared: Shared = field(default_factory=Shared)
    """with other problems of the program"""
    kept: Cache = field(default_factory=Cache)
    """what depends on no mesh"""

    def readers(self, device: Device) -> list[OpReader]:
        """Of the programs, for all meshes. A device and its `for_bounds` share them."""
        key = "readers", device.name, device.efficiency is None
        return self.kept.once(
            key, lambda: [self.shared.reader(device, rule_of) for _ in self.classes]
        )

    def known_works(self, device: Device) -> list[list[list[Work] | None]]:
        """The work of the ops of each block of each program, in order, as far as it is of use."""
        found: list[list[list[Work] | None]] = []
        for one, reader in zip(self.classes, self.readers(device), strict=True):
            for block in fragment_blocks(one):
                reader.ops(block)
            found.append(list(map(reader.known.get, inner_blocks(body(one.function)))))
        return found

    def take_works(self, device: Device, known: Sequence[Sequence[list[Work] | None]]) -> None:
        """Takes the `known_works` of equal programs, such as those that were pickled."""
        for one, reader, works in zip(self.classes, self.readers(device), known, strict=True):
            for block, its in zip(inner_blocks(body(one.function)), works, strict=True):
                if its is not None:
                    reader.known[block] = its

    def read(self, device: Device) -> None:
        """Reads all ops, for problems that are posed later. Raises PassError."""
        for one, reader in zip(self.classes, self.readers(device), strict=True):
            for block in fragment_blocks(one):
                reader.read(block)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = [
            (one.layers, one.boundary, one.kept, one.stays, one.totals) for one in self.classes
        ]
        return _parsed, (bytecode(self.module), facts, self.class_of, self.links, self.axis_names)


def fragment_blocks(layer: LayerClass) -> list[ir.Block]:
    """The blocks of a program's fragments."""
    ops = body(layer.function).operations
    return [body(op) for op in ops if isinstance(op, mpmd.FragmentOp)]


def _parsed(
    data: bytes, facts: Sequence[tuple[Any, ...]], class_of: Any, links: Any, axis_names: Any
) -> LayerClasses:
    module = parse(data, cast("ir.Context | None", ir.Context.current))
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    classes = tuple(LayerClass(f, *fact) for f, fact in zip(functions, facts, strict=True))
    return LayerClasses(
        module=module, classes=classes, class_of=class_of, links=links, axis_names=axis_names
    )


def layer_classes(
    graph: Graph,
    arguments: Sequence[Argument],
    results: Sequence[Result],
    num_layers: int,
    cluster: Cluster,
    plan: Plan,
    shared: Shared | None = None,
    given: UserShardings | None = None,
    equal_before: Sequence[int] | None = None,
) -> LayerClasses:
    """The layer classes of a clustered program, whose named computations are the graph's ops.

    `shared`: with other problems of the program; `given`: its shardings; `equal_before`: the class
    of each layer before a rewrite of all layers, such as `rematerialise`.
    """
    shared = shared or Shared()
    members = layer_members(graph, num_layers)
    shardings = {} if given is None else {a: it for (a, _), it in given.on([MESH]).items()}
    equal = equal_layers(graph, arguments, results, members, shardings, equal_before)
    shape = (1,) if given is None else given.mesh.sizes
    mesh = MeshAssignment(
        name=MESH, hosts=(0,), devices=tuple(range(prod(shape))), logical_shape=shape
    )
    states = {
        graph.returned[r]: ResultRole("state", a)
        for r, a in state_pairs(arguments, results).items()
    }

    def argument(v: int) -> Argument:
        if v >= graph.num_arguments:
            return Argument(input=v)
        given = arguments[v]
        donor = given.donor or given.aliasing_output is not None
        return replace(given, input=v, slice=None, aliasing_output=None, donor=donor)

    def class_of_layers(number: int, layers: Sequence[int]) -> LayerClass:
        mine = members[layers[0]]
        inputs, outputs = graph.interface(mine)
        builder = FragmentBuilder(
            graph.part(mine),
            [argument(v) for v in inputs],
            [Result(role=states.get(v), output=r) for r, v in enumerate(outputs)],
            Stages(
                layer_stage=dict.fromkeys(layers, 0),
                meshes=[mesh],
                given=given,
                shardings={(i, 0): shardings[v] for i, v in enumerate(inputs) if v in shardings},
            ),
        )
        if not number:
            builder.declare_meshes()
        with graph.ops[mine[0]].location:
            function = builder.build(f"class_{number}", plan, cluster)
        totals = frozenset(map(outputs.index, totals_of(graph, outputs)))
        place_reductions(function, plan.num_micro_batches, totals)
        boundary = [i for i, v in enumerate(inputs) if v >= graph.num_arguments]
        return LayerClass(
            layers=tuple(layers),
            function=function,
            boundary=frozenset(boundary),
            kept=frozenset(i for i in boundary if _is_kept(graph, mine, inputs[i])),
            stays=frozenset(r for r, v in enumerate(outputs) if _is_kept(graph, mine, v)),
            totals=totals,
        )

    with graph.ops[0].context, graph.ops[0].location:
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            classes = tuple(class_of_layers(n, layers) for n, layers in enumerate(equal))
        populate(module)
    class_of = {layer: n for n, layers in enumerate(equal) for layer in layers}
    numbers = tuple(class_of[layer] for layer in range(num_layers))
    return LayerClasses(
        module=module,
        classes=classes,
        class_of=numbers,
        links=_links(graph, members, numbers),
        axis_names=None if given is None else given.axis_names,
        shared=shared,
    )


def _is_kept(graph: Graph, mine: Sequence[int], v: int) -> bool:
    """Whether a value is made by a forward part and read by the backward part of this layer."""
    parts = {_part(graph, o) for o in mine if v in graph.operands[o]}
    return _part(graph, graph.producer[v]) == "forward" and "backward" in parts


def layer_members(graph: Graph, num_layers: int) -> list[list[int]]:
    """For each layer its named computations, by their numbers among the graph's ops."""
    members: list[list[int]] = [[] for _ in range(num_layers)]
    for o, op in enumerate(graph.ops):
        layer = Origin.of(op).layer
        if layer is not None:
            members[layer].append(o)
    return members


def equal_layers(
    graph: Graph,
    arguments: Sequence[Argument],
    results: Sequence[Result],
    members: Sequence[Sequence[int]],
    shardings: Mapping[int, Sharding],
    equal_before: Sequence[int] | None = None,
) -> list[list[int]]:
    """The layers of each class.

    Args:
        graph: the computations.
        arguments: the attributes of the program's arguments.
        results: the attributes of its results.
        members: the computations of each layer.
        shardings: of arguments by number, as far as the program gives them.
        equal_before: the class of each layer before a rewrite that makes equal layers of equal
            ones. If it is given, no ops are read.
    """
    alike: dict[Hashable, list[int]] = {}
    for layer, mine in enumerate(members):
        key = _ends(graph, arguments, results, mine, shardings)
        before = None if equal_before is None else equal_before[layer]
        alike.setdefault((before, key), []).append(layer)
    found: list[list[int]] = []
    for layers in alike.values():
        if len(layers) == 1 or equal_before is not None:
            found.append(layers)
            continue
        equal: dict[Hashable, list[int]] = {}
        for layer in layers:
            recipes = tuple(block_recipe(body(graph.ops[o])) for o in members[layer])
            equal.setdefault(recipes, []).append(layer)
        found += equal.values()
    return sorted(found)


def _ends(
    graph: Graph,
    arguments: Sequence[Argument],
    results: Sequence[Result],
    mine: Sequence[int],
    shardings: Mapping[int, Sharding],
) -> Hashable:
    """A key that is the same for layers with as many ops between the same kinds of values."""
    part, (inputs, outputs) = graph.part(mine), graph.interface(mine)
    kinds: list[Hashable] = []
    for v in inputs:
        if v < graph.num_arguments:
            kind = replace(arguments[v], input=None, slice=None, aliasing_output=None)
            donated = arguments[v].aliasing_output is not None
            kinds.append((kind, donated, shardings.get(v)))
        else:
            kinds.append("outside")
    returned: dict[int, list[Hashable]] = {}
    for v, result in zip(graph.returned, results, strict=True):
        returned.setdefault(v, []).append(None if result.role is None else result.role.kind)
    inside, totals = set(mine), set(totals_of(graph, outputs))
    given = [
        (not inside.issuperset(graph.users[v]), v in totals, tuple(returned.get(v, ())))
        for v in outputs
    ]
    computations = [
        (Origin.of(op).part, tuple(operands), len(body(op).operations))
        for op, operands in zip(part.ops, part.operands, strict=True)
    ]
    return tuple(kinds), tuple(part.returned), tuple(given), tuple(computations)


def _part(graph: Graph, o: int) -> Part:
    return Origin.of(graph.ops[o]).part


def _links(
    graph: Graph, members: Sequence[Sequence[int]], class_of: Sequence[int]
) -> dict[Link, tuple[tuple[int, int], ...]]:
    """The links of all layers. Equal layers have equal ends, in the same order."""
    ends = [graph.interface(mine) for mine in members]
    maker = {v: layer for layer, mine in enumerate(members) for v in graph.made_by(mine)}
    found: dict[Link, list[tuple[int, int]]] = {}
    for reader, mine in enumerate(members):
        reads: list[tuple[int, Part]] = [
            (v, _part(graph, o)) for o in mine for v in graph.operands[o]
        ]
        for v, part in dict.fromkeys(reads):
            producer = maker.get(v, reader)
            if producer != reader:
                link = Link(
                    producer=class_of[producer],
                    result=ends[producer][1].index(v),
                    reader=class_of[reader],
                    argument=ends[reader][0].index(v),
                    part=part,
                )
                found.setdefault(link, []).append((producer, reader))
    return {link: tuple(pairs) for link, pairs in found.items()}
