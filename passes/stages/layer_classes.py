"""Classes of equal layers: each class is costed once, as a small program of its own.

Layers are equal if their computations have the same ops, the same types, and operands of the same
kind. The program of a class holds the computations of its first layer, on one mesh. Values from
other layers are its arguments, values for other layers its results. A chain of layers is thus a
chain of classes and the `Link`s between them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from alpa.dialects import body, func, ir, main_function, parse, terminator
from alpa.dialects.attributes import Argument, Part, Result, ResultRole, state_pairs
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import MeshAssignment, Plan
from alpa.passes.analysis.graph import Graph, recipe
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.gradient_reductions import place_reductions
from alpa.passes.stages.merge import FragmentBuilder, Stages, totals_of

MESH = "mesh_0"
"""the mesh of a class's program"""


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


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerClass:
    """Equal layers and the program of one of them.

    `boundary` numbers the program's arguments that other layers make.
    """

    layers: tuple[int, ...]
    function: func.FuncOp
    module: ir.Module
    boundary: frozenset[int]
    kept: frozenset[int]
    """boundary arguments that another layer's forward part makes and this one's backward reads"""
    totals: frozenset[int]
    """the program's results that are gradients for updates of other layers, which read them as sums
    over the micro-batches"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerClasses:
    """All layers by class, and the linked layers: pairs (producer, reader) per link."""

    classes: tuple[LayerClass, ...]
    class_of: tuple[int, ...]
    links: dict[Link, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class ClassesText:
    """Layer classes as text, which can be sent to another process and compared."""

    programs: tuple[str, ...]
    layers: tuple[tuple[int, ...], ...]
    boundary: tuple[frozenset[int], ...]
    kept: tuple[frozenset[int], ...]
    totals: tuple[frozenset[int], ...]
    class_of: tuple[int, ...]
    links: tuple[tuple[Link, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, classes: LayerClasses) -> ClassesText:
        """Prints the programs with their current attributes."""
        return cls(
            programs=tuple(str(one.module) for one in classes.classes),
            layers=tuple(one.layers for one in classes.classes),
            boundary=tuple(one.boundary for one in classes.classes),
            kept=tuple(one.kept for one in classes.classes),
            totals=tuple(one.totals for one in classes.classes),
            class_of=classes.class_of,
            links=tuple(classes.links.items()),
        )

    def parse(self) -> LayerClasses:
        """Parses the programs in a fresh context."""
        first = parse(self.programs[0])
        modules = [first, *(parse(text, first.context) for text in self.programs[1:])]
        return LayerClasses(
            classes=tuple(
                LayerClass(
                    layers=layers,
                    function=main_function(module),
                    module=module,
                    boundary=boundary,
                    kept=kept,
                    totals=totals,
                )
                for module, layers, boundary, kept, totals in zip(
                    modules, self.layers, self.boundary, self.kept, self.totals, strict=True
                )
            ),
            class_of=self.class_of,
            links=dict(self.links),
        )


def layer_classes(
    graph: Graph,
    arguments: Sequence[Argument],
    results: Sequence[Result],
    num_layers: int,
    cluster: Cluster,
    plan: Plan,
) -> LayerClasses:
    """The layer classes of a clustered program, whose named computations are the graph's ops."""
    members = layer_members(graph, num_layers)
    equal = equal_layers(graph, arguments, results, members)
    programs = [_Program.of(graph, arguments, results, members[layers[0]]) for layers in equal]
    class_of = [0] * num_layers
    for number, layers in enumerate(equal):
        for layer in layers:
            class_of[layer] = number
    return LayerClasses(
        classes=tuple(
            program.build(tuple(layers), cluster, plan)
            for program, layers in zip(programs, equal, strict=True)
        ),
        class_of=tuple(class_of),
        links=_links(graph, members, class_of, programs),
    )


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
) -> list[list[int]]:
    """The layers of each class, where `members` are the computations of each layer."""
    found: dict[Hashable, list[int]] = {}
    for layer, mine in enumerate(members):
        found.setdefault(_signature(graph, arguments, results, mine), []).append(layer)
    return list(found.values())


def _signature(
    graph: Graph, arguments: Sequence[Argument], results: Sequence[Result], mine: Sequence[int]
) -> Hashable:
    """A key that is the same for layers with equal computations on the same kinds of values."""
    position = {v: (k, r) for k, o in enumerate(mine) for r, v in enumerate(graph.results[o])}
    first: dict[int, int] = {}
    returned: dict[int, list[Hashable]] = {}
    for v, result in zip(graph.returned, results, strict=True):
        returned.setdefault(v, []).append(None if result.role is None else result.role.kind)
    inside = set(mine)
    totals = set(totals_of(graph, (v for o in mine for v in graph.results[o])))
    parts: list[Hashable] = []
    for o in mine:
        op = graph.ops[o]
        read: list[Hashable] = []
        for v in graph.operands[o]:
            if v < graph.num_arguments:
                kind = replace(arguments[v], input=None, slice=None, aliasing_output=None)
                donated = arguments[v].aliasing_output is not None
                read.append(("argument", kind, donated, first.setdefault(v, len(first))))
            else:
                read.append(position.get(v, ("outside", first.setdefault(v, len(first)))))
        outside = tuple(
            (
                any(u not in inside for u in graph.users[v]),
                v in totals,
                tuple(returned.get(v, ())),
            )
            for v in graph.results[o]
        )
        origin = Origin.of(op)
        ops = _block_recipe(body(op))
        parts.append((origin.part, tuple(read), outside, ops))
    return tuple(parts)


def _block_recipe(block: ir.Block) -> Hashable:
    """A key of what a block computes, independent of the names of its values."""
    number: dict[ir.Value, int] = {}
    for argument in block.arguments:
        number[argument] = len(number)
    ops: list[Hashable] = [tuple(argument.type for argument in block.arguments)]
    for op in block.operations:
        ops.append(recipe(op, number.__getitem__, {}))
        for result in op.results:
            number[result] = len(number)
    return tuple(ops)


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The arguments and results of a class's program, by the numbers of the whole graph."""

    graph: Graph
    arguments: Sequence[Argument]
    results: Sequence[Result]
    members: Sequence[int]
    inputs: list[int]
    outputs: list[int]

    @classmethod
    def of(
        cls,
        graph: Graph,
        arguments: Sequence[Argument],
        results: Sequence[Result],
        members: Sequence[int],
    ) -> _Program:
        made = {v for o in members for v in graph.results[o]}
        inside, returned = set(members), set(graph.returned)
        inputs = list(dict.fromkeys(v for o in members for v in graph.operands[o] if v not in made))
        outputs = [
            v
            for o in members
            for v in graph.results[o]
            if v in returned or any(u not in inside for u in graph.users[v])
        ]
        return cls(
            graph=graph,
            arguments=arguments,
            results=results,
            members=members,
            inputs=inputs,
            outputs=outputs,
        )

    def build(self, layers: tuple[int, ...], cluster: Cluster, plan: Plan) -> LayerClass:
        graph = self.graph
        number = {v: i for i, v in enumerate(self.inputs)}
        states = {
            graph.returned[r]: ResultRole("state", a)
            for r, a in state_pairs(self.arguments, self.results).items()
        }
        context = graph.ops[0].context
        with context, graph.ops[self.members[0]].location:
            module = ir.Module.create()
            with ir.InsertionPoint(module.body):
                function = func.FuncOp(
                    "main",
                    ir.FunctionType.get(
                        [graph.values[v].type for v in self.inputs],
                        [graph.values[v].type for v in self.outputs],
                    ),
                    visibility="public",
                )
            arguments = [
                replace(
                    self.arguments[v],
                    input=v,
                    slice=None,
                    aliasing_output=None,
                    donor=self._donated(v),
                )
                if v < graph.num_arguments
                else Argument(input=v)
                for v in self.inputs
            ]
            results = [Result(role=states.get(v), output=r) for r, v in enumerate(self.outputs)]
            function.attributes["arg_attrs"] = ir.ArrayAttr.get(
                [argument.to_attr() for argument in arguments]
            )
            function.attributes["res_attrs"] = ir.ArrayAttr.get(
                [result.to_attr() for result in results]
            )
            block = function.add_entry_block()
            inside = {graph.values[v]: block.arguments[i] for v, i in number.items()}
            with ir.InsertionPoint(block):
                for o in self.members:
                    clone = graph.ops[o].operation.clone()
                    for i, operand in enumerate(clone.operands):
                        clone.operands[i] = inside[operand]
                    inside.update(zip(graph.ops[o].results, clone.results, strict=True))
                func.ReturnOp([inside[graph.values[v]] for v in self.outputs])
            mesh = MeshAssignment(name=MESH, hosts=(0,), devices=(0,), logical_shape=(1,))
            stages = Stages(layer_stage=dict.fromkeys(layers, 0), meshes=[mesh])
            inner = Graph.of(body(function))
            FragmentBuilder(module, function, inner, arguments, results, stages).rewrite(
                plan, cluster
            )
        planned = module.body.operations[len(module.body.operations) - 1]
        assert isinstance(planned, func.FuncOp)
        boundary = {i for v, i in number.items() if v >= graph.num_arguments}
        totals = frozenset(map(self.outputs.index, totals_of(graph, self.outputs)))
        if plan.num_micro_batches > 1:
            with context:
                place_reductions(planned, totals)
        return LayerClass(
            layers=layers,
            function=planned,
            module=module,
            boundary=frozenset(boundary),
            kept=frozenset(i for i in boundary if self._kept(self.inputs[i])),
            totals=totals,
        )

    def _donated(self, v: int) -> bool:
        return self.arguments[v].donor or self.arguments[v].aliasing_output is not None

    def _kept(self, v: int) -> bool:
        """Whether the value is made by a forward part and read by this layer's backward part."""
        graph = self.graph
        parts = {_part(graph, o) for o in self.members if v in graph.operands[o]}
        return _part(graph, graph.producer[v]) == "forward" and "backward" in parts


def _part(graph: Graph, o: int) -> Part:
    return Origin.of(graph.ops[o]).part


def _links(
    graph: Graph,
    members: Sequence[Sequence[int]],
    class_of: Sequence[int],
    programs: Sequence[_Program],
) -> dict[Link, tuple[tuple[int, int], ...]]:
    """The links of all layers. Equal layers have equal links."""
    layer = {o: number for number, mine in enumerate(members) for o in mine}
    # Equal layers have their values at the same places: (computation, result) names them.
    outputs = [
        {_place(graph, program.members, v): r for r, v in enumerate(program.outputs)}
        for program in programs
    ]
    inputs = [{v: i for i, v in enumerate(program.inputs)} for program in programs]
    found: dict[Link, list[tuple[int, int]]] = {}
    for reader, mine in enumerate(members):
        program = programs[class_of[reader]]
        seen: set[tuple[int, Part]] = set()
        for k, o in enumerate(mine):
            part = _part(graph, o)
            of_class = graph.operands[program.members[k]]
            for v, same in zip(graph.operands[o], of_class, strict=True):
                producer = layer.get(graph.producer[v]) if v >= graph.num_arguments else None
                if producer is None or producer == reader or (v, part) in seen:
                    continue
                seen.add((v, part))
                place = _place(graph, members[producer], v)
                link = Link(
                    producer=class_of[producer],
                    result=outputs[class_of[producer]][place],
                    reader=class_of[reader],
                    argument=inputs[class_of[reader]][same],
                    part=part,
                )
                found.setdefault(link, []).append((producer, reader))
    return {link: tuple(pairs) for link, pairs in found.items()}


def _place(graph: Graph, members: Sequence[int], v: int) -> tuple[int, int]:
    o = graph.producer[v]
    return members.index(o), graph.results[o].index(v)


def returned(layer: LayerClass) -> list[ir.Value]:
    """The values that the program of a class returns."""
    return list(terminator(body(layer.function)).operands)
