"""What has to hold between layers and between stages, checked on the module itself.

`check_layers` takes what `layer-cluster` makes, `check_stages` what `stage-mesh-partition` and the
passes after it make. In both a computation has a *part* and a *place*: its layer, or its stage.

* Once: a layer has one forward and at most one backward computation.
* Flow: the forward part goes from lower to higher places, the backward part from higher to lower
  ones, and nothing goes back from update to backward or forward, or from backward to forward. So
  every stage can run as soon as its neighbour has, and the update once after all micro-batches.
* Shared parameters: each layer computes its own part of the gradient, and accumulates it over the
  micro-batches on its own mesh. A backward computation must not add parts of several places.
* Updates (layers only): `update_3` makes new state of layer 3, or reads only gradients and
  parameters of that layer. Updates that combine layers are in `update_global`. A parameter belongs
  to the first layer whose forward computation reads it.
* Stages only: the layers of a stage are neighbours, stages follow one another as their layers do, a
  layer's backward and update are on its forward's mesh, and each copy of a state is replaced. A
  mesh may have several stages.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from alpa.dialects import body, func, ir, main_function, mpmd, stablehlo, terminator
from alpa.dialects.attributes import marker_of
from alpa.dialects.checks import check_planned
from alpa.dialects.mpmd_types import Origin, mesh_of
from alpa.passes.analysis.layer_placement import CHEAP
from alpa.passes.analysis.step_parts import SAME_ELEMENTS
from alpa.passes.base import PassError, errors_at
from alpa.passes.plan.checks import ORDER
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.update_checks import Unit, check_updates

_NAME = re.compile(r"layer_\d+|update_(\d+|global)")

Makers = Mapping[ir.Value, Unit]
"""What makes each value of @main, transfers apart; arguments are left out."""


def check_layers(function: func.FuncOp) -> None:
    """Checks a clustered `@main`.

    Raises:
        PassError: at the computation that is wrong.
    """
    units: list[Unit] = []
    for op in list(body(function).operations)[:-1]:
        if not isinstance(op, mpmd.NamedComputationOp):
            raise PassError(
                op, f"{op.name} is outside of any layer; run layer-cluster before this pass"
            )
        origin = Origin.of(op)
        place = -1 if origin.layer is None else origin.layer
        name = _text(origin)
        units.append(Unit(op=op, origins=(origin,), part=origin.part, place=place, name=name))
    makers: Makers = {value: unit for unit in units for value in unit.op.results}
    _check_once(units)
    _check_flow(units, makers, "layer")
    _check_sums(units, makers)
    check_updates(function, units)


def check_stages(module: ir.Module) -> None:
    """Checks a planned `@main`.

    Raises:
        PassError: at the fragment that is wrong.
    """
    with errors_at(module.operation):
        check_planned(module)
    program, function = read_planned(module), main_function(module)
    numbers = {mesh.name: number for number, mesh in enumerate(program.meshes)}
    units: list[Unit] = []
    makers: dict[ir.Value, Unit] = {}
    for op, step in zip(body(function).operations, program.steps, strict=False):
        if isinstance(step, Fragment):
            name = f"the {step.part} of {', '.join(map(_text, step.origins))}"
            place = numbers[step.mesh] if step.stage is None else step.stage
            unit = Unit(op=op, origins=step.origins, part=step.part, place=place, name=name)
            units.append(unit)
            makers.update(dict.fromkeys(op.results, unit))
        elif op.operands[0] in makers:
            makers[op.results[0]] = makers[op.operands[0]]
    _check_once(units)
    _check_intervals(units)
    _check_flow(units, makers, "stage")
    _check_sums(units, makers)
    _check_copies(program, function)


def placed_ops(ops: Iterable[ir.OpView]) -> Counter[str]:
    """Counts the ops by name, except markers and cheap ops, which may be copied."""
    ops = list(ops)
    names = [op.operation.name for op in ops]
    pairs = zip(ops, names, strict=True)
    calls = (op for op, name in pairs if name == "stablehlo.custom_call")
    found = Counter(names)
    found["stablehlo.custom_call"] -= sum(marker_of(op) is not None for op in calls)
    return Counter({name: n for name, n in found.items() if n and name not in CHEAP})


def check_placed_once(before: Counter[str], function: func.FuncOp) -> None:
    """Checks that the layers of a clustered `@main` hold each op of the program once.

    Args:
        before: `placed_ops` of the program that was clustered.
        function: its `@main` now.

    Raises:
        PassError: at the function, with the kind of op that was lost or repeated.
    """
    computations = list(body(function).operations)[:-1]
    after = placed_ops(op for it in computations for op in list(body(it).operations)[:-1])
    for name in sorted(before.keys() | after.keys()):
        if before[name] != after[name]:
            raise PassError(
                function,
                f"{after[name]} {name} ops are in layers, {before[name]} in the program: each op "
                "belongs to one computation",
            )


def _text(origin: Origin) -> str:
    return f"{origin.name}({origin.transpose_count})" if origin.transpose_count else origin.name


def _check_once(units: Sequence[Unit]) -> None:
    """Updates may stand in several places: what they wait for comes between."""
    first: dict[Origin, ir.OpView] = {}
    for op, origin in ((unit.op, origin) for unit in units for origin in unit.origins):
        if not _NAME.fullmatch(origin.name) or origin.transpose_count not in (0, 1):
            raise PassError(
                op,
                f"{_text(origin)} is no layer: expected layer_<number>, its backward "
                "layer_<number>(1), update_<number> or update_global",
            )
        if origin.part == "update":
            if origin.transpose_count:
                raise PassError(op, f"{_text(origin)}: an update has no backward")
            continue
        if origin in first:
            raise PassError(
                op, f"{_text(origin)} is there twice", ((first[origin], "the first time"),)
            )
        first[origin] = op
    for origin, op in first.items():
        if origin.transpose_count and Origin(origin.name) not in first:
            raise PassError(op, f"{_text(origin)} has no forward: {origin.name} is not there")


def _check_flow(units: Sequence[Unit], makers: Makers, what: str) -> None:
    for unit in units:
        for number, value in enumerate(unit.op.operands):
            maker = makers.get(value)
            if maker is None:
                continue
            note = ((maker.op, f"made here, by {maker.name}"),)
            if ORDER[maker.part] > ORDER[unit.part]:
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


def _check_sums(units: Sequence[Unit], makers: Makers) -> None:
    """No gradient is summed with what another place made of it."""
    parts = {unit.op: unit.part for unit in units}
    for unit in units:
        if unit.part != "backward":
            continue
        block = body(unit.op)
        outer = dict[ir.Value, ir.Value](zip(block.arguments, unit.op.operands, strict=True))
        for number, (value, result) in enumerate(
            zip(terminator(block).operands, unit.op.results, strict=True)
        ):
            if {parts.get(reader) for reader in _readers(result)} != {"update"}:
                continue
            for summand in _summands(value):
                maker = makers.get(outer[summand])
                if maker is not None and maker.part == "backward":
                    raise PassError(
                        unit.op,
                        f"result {number} of {unit.name} adds to a gradient what {maker.name} "
                        "made of it; each makes its own part, and the update adds them up",
                        ((maker.op, "the other part is made here"),),
                    )


def _readers(value: ir.Value) -> Iterator[ir.OpView]:
    """The ops that read a value of @main, transfers apart."""
    for use in value.uses:
        if isinstance(use.owner, mpmd.TransferOp):
            yield from _readers(use.owner.results[0])
        else:
            yield use.owner


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


def _check_intervals(units: Sequence[Unit]) -> None:
    """Parts are those of the origins, and layers are where their neighbours are."""
    home: dict[int, Unit] = {}
    for unit in units:
        for origin in unit.origins:
            if origin.part != unit.part:
                raise PassError(
                    unit.op, f"{_text(origin)} is {origin.part} and in a {unit.part} fragment"
                )
            if unit.part == "forward" and origin.layer is not None:
                home[origin.layer] = unit
    for unit in units:
        for origin in unit.origins:
            forward = None if origin.layer is None else home.get(origin.layer)
            if forward is not None and _mesh_of(forward) != _mesh_of(unit):
                raise PassError(
                    unit.op,
                    f"{_text(origin)} is on {_mesh_of(unit)}, the layer's forward on "
                    f"{_mesh_of(forward)}: its parameters and activations would cross",
                    ((forward.op, "the layer's forward"),),
                )
    for lower, upper in pairwise(sorted(home)):
        unit, following = home[lower], home[upper]
        if unit.place > following.place:
            raise PassError(
                following.op,
                f"layer_{upper} is in stage {following.place} on {_mesh_of(following)}, and "
                f"layer_{lower} before it in stage {unit.place} on {_mesh_of(unit)}: stages are "
                "intervals of layers, in their order",
                ((unit.op, f"layer_{lower}"),),
            )


def _mesh_of(unit: Unit) -> str:
    assert isinstance(unit.op, mpmd.FragmentOp), "units of a planned program are fragments"
    return mesh_of(unit.op)


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
