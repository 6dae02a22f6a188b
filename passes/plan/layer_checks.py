"""What has to hold between layers and between stages, checked on the module itself.

`check_layers` takes what `layer-cluster` makes, `check_stages` what `stage-mesh-partition` and the
passes after it make. In both a computation has a *part* and a *place*: its layer, or its mesh.

* Once: a layer has one forward and at most one backward computation.
* Flow: the forward part goes from lower to higher places, the backward part from higher to lower
  ones, and nothing goes back from update to backward or forward, or from backward to forward. So
  every stage can run as soon as its neighbour has, and the update once after all micro-batches.
* Shared parameters: each layer computes its own part of the gradient, and accumulates it over the
  micro-batches on its own mesh. A backward computation must not add parts of several places.
* Updates (layers only): `update_3` makes new state of layer 3, or reads only gradients and
  parameters of that layer. Updates that combine layers are in `update_global`. A parameter belongs
  to the first layer whose forward computation reads it.
* Stages only: the layers of a mesh are neighbours, meshes follow one another as their layers do, a
  layer's backward and update are on its forward's mesh, and each copy of a state is replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from alpa.dialects import body, func, ir, mpmd, stablehlo, terminator
from alpa.dialects.attributes import (
    Part,
    marker_of,
    read_arguments,
    read_results,
    state_pairs,
)
from alpa.dialects.checks import check_planned
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.layer_placement import CHEAP
from alpa.passes.analysis.step_parts import SAME_ELEMENTS
from alpa.passes.base import PassError, errors_at
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.update_checks import Unit, Updates

_NAME = re.compile(r"layer_\d+|update_(\d+|global)")
_ORDER: dict[Part, int] = {"forward": 0, "backward": 1, "update": 2}


def origins_of(graph: Graph) -> list[Origin]:
    """The origins of a clustered module's computations.

    Raises:
        PassError: an op is outside of any layer, or the name of one is not `layer-cluster`'s.
    """
    origins: list[Origin] = []
    for op in graph.ops:
        if not isinstance(op, mpmd.NamedComputationOp):
            raise PassError(
                op, f"{op.name} is outside of any layer; run layer-cluster before this pass"
            )
        origins.append(_known(op, Origin.of(op)))
    return origins


def check_layers(function: func.FuncOp) -> None:
    """Checks a clustered `@main`.

    Raises:
        PassError: at the computation that is wrong.
    """
    graph = Graph.of(body(function))
    origins = origins_of(graph)
    places = [origin.layer for origin in origins]
    number = {value: v for v, value in enumerate(graph.values)}
    operands = [[number[value] for value in op.operands] for op in graph.ops]
    returned = set(graph.returned)
    units = [
        Unit(
            op=op,
            part=origin.part,
            place=-1 if place is None else place,
            name=_text(origin),
            inputs=[graph.producer[v] for v in used],
            readers=[None if v in returned else set(graph.users[v]) for v in results],
        )
        for op, origin, place, used, results in zip(
            graph.ops, origins, places, operands, graph.results, strict=True
        )
    ]
    _check_once((unit.op, origin) for unit, origin in zip(units, origins, strict=True))
    _check_flow(units, "layer")
    _check_sums(units)
    with errors_at(function):
        states = state_pairs(read_arguments(function), read_results(function))
    Updates.of(graph, operands, units, states).check()


def check_stages(module: ir.Module, function: func.FuncOp) -> None:
    """Checks a planned `@main`.

    Raises:
        PassError: at the fragment that is wrong.
    """
    with errors_at(function):
        check_planned(module)
    program = read_planned(module)
    ops = list(body(function).operations)[:-1]
    fragments = [
        (op, step)
        for op, step in zip(ops, program.steps, strict=True)
        if isinstance(step, Fragment)
    ]
    _check_once((op, _known(op, origin)) for op, f in fragments for origin in f.origins)
    _check_intervals(program, fragments)
    units = _fragment_units(program, fragments)
    _check_flow(units, "mesh")
    _check_sums(units)
    _check_copies(program, function)


def placed_ops(ops: Iterable[ir.OpView]) -> Counter[str]:
    """Counts the ops by name, except markers and cheap ops, which may be copied."""
    return Counter(op.name for op in ops if op.name not in CHEAP and marker_of(op) is None)


def check_placed_once(before: Counter[str], function: func.FuncOp) -> None:
    """Checks that the layers of a clustered `@main` hold each op of the program once.

    Args:
        before: `placed_ops` of the program that was clustered.
        function: its `@main` now.

    Raises:
        PassError: at the function, with the kind of op that was lost or repeated.
    """
    inner = (op for computation in body(function).operations for op in _inner(computation))
    after = placed_ops(inner)
    for name in sorted(before.keys() | after.keys()):
        if before[name] != after[name]:
            raise PassError(
                function,
                f"{after[name]} {name} ops are in layers, {before[name]} in the program: each op "
                "belongs to one computation",
            )


def _known(op: ir.OpView, origin: Origin) -> Origin:
    transposed = origin.transpose_count
    if not _NAME.fullmatch(origin.name) or transposed not in (0, 1):
        raise PassError(
            op,
            f"{_text(origin)} is no layer: expected layer_<number>, its backward "
            "layer_<number>(1), update_<number> or update_global",
        )
    if transposed and origin.part == "update":
        raise PassError(op, f"{_text(origin)}: an update has no backward")
    return origin


def _text(origin: Origin) -> str:
    return f"{origin.name}({origin.transpose_count})" if origin.transpose_count else origin.name


def _inner(op: ir.OpView) -> list[ir.OpView]:
    """The ops of a computation."""
    if not isinstance(op, mpmd.NamedComputationOp):
        return []
    return list(body(op).operations)[:-1]


def _check_once(origins: Iterable[tuple[ir.OpView, Origin]]) -> None:
    """Updates may stand in several places: what they wait for comes between."""
    first: dict[Origin, ir.OpView] = {}
    for op, origin in origins:
        if origin.part == "update":
            continue
        if origin in first:
            raise PassError(
                op, f"{_text(origin)} is there twice", ((first[origin], "the first time"),)
            )
        first[origin] = op
    for origin, op in first.items():
        if origin.transpose_count and Origin(origin.name) not in first:
            raise PassError(op, f"{_text(origin)} has no forward: {origin.name} is not there")


def _check_flow(units: Sequence[Unit], what: str) -> None:
    for unit in units:
        for number, made_by in enumerate(unit.inputs):
            if made_by < 0:
                continue
            maker = units[made_by]
            note = ((maker.op, f"made here, by {maker.name}"),)
            if _ORDER[maker.part] > _ORDER[unit.part]:
                raise PassError(
                    unit.op,
                    f"operand {number} of {unit.name}, which is {unit.part}, is made by the "
                    f"{maker.part} {maker.name}: every forward runs before its backward, and these "
                    "before the update",
                    note,
                )
            if unit.part == "update" or maker.part != unit.part:
                continue
            ahead = unit.place - maker.place
            if ahead * (1 if unit.part == "forward" else -1) < 0:
                way = "lower to higher" if unit.part == "forward" else "higher to lower"
                raise PassError(
                    unit.op,
                    f"operand {number} of {unit.name} on {what} {unit.place} is made on {what} "
                    f"{maker.place}: {unit.part} values flow from {way} ones",
                    note,
                )


def _check_sums(units: Sequence[Unit]) -> None:
    """No gradient is summed with what another place made of it."""
    for unit in units:
        if unit.part != "backward":
            continue
        block = body(unit.op)
        arguments: dict[ir.Value, int] = {v: number for number, v in enumerate(block.arguments)}
        for result, readers in enumerate(unit.readers):
            if not readers or any(units[r].part != "update" for r in readers):
                continue
            for value in _summands(terminator(block).operands[result]):
                made_by = unit.inputs[arguments[value]] if value in arguments else -1
                if made_by >= 0 and units[made_by].part == "backward":
                    raise PassError(
                        unit.op,
                        f"result {result} of {unit.name} adds to a gradient what "
                        f"{units[made_by].name} made of it; each makes its own part, and the "
                        "update adds them up",
                        ((units[made_by].op, "the other part is made here"),),
                    )


def _summands(value: ir.Value) -> list[ir.Value]:
    """What a value is the sum of, where it is one and nothing else reads its partial sums."""
    found: list[ir.Value] = []
    stack, added = [value], False
    while stack:
        value = stack.pop()
        if len(list(value.uses)) != 1:
            continue
        if isinstance(value.owner, ir.Block):
            found.append(value)
        elif isinstance(value.owner.opview, stablehlo.AddOp):
            added = True
            stack += value.owner.operands
        elif value.owner.name in SAME_ELEMENTS and len(value.owner.operands) == 1:
            stack += value.owner.operands
    return found if added else []


def _fragment_units(
    program: Program, fragments: Sequence[tuple[ir.OpView, Fragment]]
) -> list[Unit]:
    numbers = {mesh.name: number for number, mesh in enumerate(program.meshes)}
    maker = {v: i for i, (_, f) in enumerate(fragments) for v in f.outputs}
    readers: dict[int, set[int] | None] = {}
    readers.update({result.value: None for result in program.results})
    for i, (_, fragment) in enumerate(fragments):
        for v in fragment.inputs:
            if (known := readers.setdefault(v, set())) is not None:
                known.add(i)
    for step in program.transfers:
        if step.source in maker:
            maker[step.target] = maker[step.source]
    for step in reversed(program.transfers):
        here, there = readers.get(step.source, set()), readers.get(step.target, set())
        readers[step.source] = None if here is None or there is None else here | there
    return [
        Unit(
            op=op,
            part=fragment.part,
            place=numbers[fragment.mesh],
            name=f"the {fragment.part} of {', '.join(map(_text, fragment.origins))}",
            inputs=[maker.get(v, -1) for v in fragment.inputs],
            readers=[readers.get(v, set()) for v in fragment.outputs],
        )
        for op, fragment in fragments
    ]


def _check_intervals(program: Program, fragments: Sequence[tuple[ir.OpView, Fragment]]) -> None:
    """Parts are those of the origins, and layers are where their neighbours are."""
    home: dict[int, tuple[str, ir.OpView]] = {}
    for op, fragment in fragments:
        for origin in fragment.origins:
            if origin.part != fragment.part:
                raise PassError(
                    op, f"{_text(origin)} is {origin.part} and in a {fragment.part} fragment"
                )
            if fragment.part == "forward" and (layer := origin.layer) is not None:
                home[layer] = fragment.mesh, op
    for op, fragment in fragments:
        for origin in fragment.origins:
            layer = origin.layer
            if layer in home and home[layer][0] != fragment.mesh:
                raise PassError(
                    op,
                    f"{_text(origin)} is on {fragment.mesh}, the layer's forward on "
                    f"{home[layer][0]}: its parameters and activations would cross",
                    ((home[layer][1], "the layer's forward"),),
                )
    order = {mesh.name: number for number, mesh in enumerate(program.meshes)}
    for lower, upper in zip(sorted(home), sorted(home)[1:], strict=False):
        (mesh, op), (next_mesh, next_op) = home[lower], home[upper]
        if order[mesh] > order[next_mesh]:
            raise PassError(
                next_op,
                f"layer_{upper} is on {next_mesh} and layer_{lower} before it on {mesh}: stages "
                "are intervals of layers, in the order of the meshes",
                ((op, f"layer_{lower}"),),
            )


def _check_copies(program: Program, function: func.FuncOp) -> None:
    """Each copy of a state gets the new value, or the meshes would go different ways."""
    for number, argument in enumerate(program.arguments):
        new = program.new_states[argument.value]
        if argument.attributes.role != "state" or not new:
            continue
        mesh = program.values[argument.value].mesh
        meshes = [program.values[value].mesh for value in new]
        if mesh not in meshes:
            raise PassError(
                function,
                f"argument {number} is the copy on {mesh} of state {argument.number}, whose new "
                f"value is returned on {', '.join(meshes)} only",
            )
