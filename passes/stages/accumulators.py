"""Gives gradients a wide type where they are added up over the micro-batches.

An accumulator has the type of the value that a backward computation hands to an update. So the type
is in the program: memory, collectives and transfers are counted by the same rules as those of every
other value, and `export-stages` adds up what it finds. `Plan.accumulator` says which type that is.

Before:
    %g = mpmd.named_computation<"layer_0"(1)> (%w, %x) (...) {
      ...
      mpmd.return %0 : tensor<16x16xbf16> }
    %n = mpmd.named_computation<"update_0"(0)> (%w, %g) (%a: tensor<16x16xbf16>,
                                                         %b: tensor<16x16xbf16>) {
      %1 = stablehlo.subtract %a, %b : tensor<16x16xbf16>
      ... }

After:
    %g = mpmd.named_computation<"layer_0"(1)> (%w, %x) (...) {
      ...
      %1 = stablehlo.convert %0 : (tensor<16x16xbf16>) -> tensor<16x16xf32>
      mpmd.return %1 : tensor<16x16xf32> }
    %n = mpmd.named_computation<"update_0"(0)> (%w, %g) (%a: tensor<16x16xbf16>,
                                                         %b: tensor<16x16xf32>) {
      %1 = stablehlo.convert %b : (tensor<16x16xf32>) -> tensor<16x16xbf16>
      %2 = stablehlo.subtract %a, %1 : tensor<16x16xbf16>
      ... }

The mean is taken in the wide type: `export-stages` scales the total before the update converts it.
An update that converts the gradient to a wider type itself does so from the total.

A value with other readers keeps its type, and the updates get a wide copy. This is the case for a
gradient that another backward computation reads or that is returned. It is also the case for a
loss: a forward computation makes it, a result is its mean or sum, and an update reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa.dialects import body, func, ir, mpmd, sdy, stablehlo, terminator
from alpa.dialects.attributes import FOLLOW, Result
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import Plan
from alpa.dialects.records import i64
from alpa.passes.analysis.graph import Graph, element_bytes, first_reader, type_bytes
from alpa.passes.stages.rewrites import with_interface

_MOVES = (sdy.ShardingConstraintOp, stablehlo.ReshapeOp, stablehlo.TransposeOp)


def widen_accumulators(function: func.FuncOp, results: Sequence[Result], plan: Plan) -> int:
    """Rewrites a clustered program in place; with one micro-batch nothing is added up.

    `results` are the attributes of those of `function`. Returns by how many bytes this
    enlarges all sums together.
    """
    if plan.num_micro_batches == 1:
        return 0
    graph = Graph.of(body(function))
    parts = [Origin.of(op).part for op in graph.ops]
    pairs = zip(graph.returned, results, strict=True)
    losses = {v for v, r in pairs if r.role is not None and r.role.kind in ("mean", "sum")}
    added = 0
    for o, op in enumerate(graph.ops):
        totals: dict[int, tuple[ir.RankedTensorType, bool]] = {}
        for number, v in enumerate(graph.results[o]):
            updates = [u for u in graph.users[v] if parts[u] == "update"]
            is_total = parts[o] == "backward" or (parts[o] == "forward" and v in losses)
            type_ = graph.values[v].type
            if not (updates and is_total and isinstance(type_, ir.RankedTensorType)):
                continue
            wide = plan.accumulator_type(type_)
            if wide != type_:
                is_alone = updates == graph.users[v] and v not in graph.returned
                added += type_bytes(wide) - graph.bytes[v]
                totals[number] = wide, is_alone
        if totals:
            _widen(op, totals)
    return added


def _widen(op: ir.OpView, totals: Mapping[int, tuple[ir.RankedTensorType, bool]]) -> None:
    """Gives updates wide versions of a computation's results.

    `totals` has by the result's number the wide type, and whether only updates read the result.
    """
    end = terminator(body(op))
    outputs: list[tuple[ir.Value, ir.Value | None]] = list(
        zip(end.operands, op.results, strict=True)
    )
    place: list[int] = []
    with ir.InsertionPoint(end), end.location:
        for number, (wide, is_alone) in totals.items():
            value, result = outputs[number]
            converted = _convert(value, wide).result
            if is_alone:
                place.append(number)
                outputs[number] = converted, result
            else:
                place.append(len(outputs))
                outputs.append((converted, None))
    inputs = list(zip(body(op).arguments, op.operands, strict=True))
    new = with_interface(op, inputs, outputs)
    for (number, (wide, _)), at in zip(totals.items(), place, strict=True):
        for use in list(new.results[number].uses):
            reader, operand = use.owner, use.operand_number
            if isinstance(reader, mpmd.NamedComputationOp) and Origin.of(reader).part == "update":
                reader.operands[operand] = new.results[at]
                _narrow(reader, operand, wide)


def _narrow(update: mpmd.NamedComputationOp, number: int, wide: ir.RankedTensorType) -> None:
    """Makes an operand of an update wide, and converts it back before its first reader."""
    argument = body(update).arguments[number]
    narrow = ir.RankedTensorType(argument.type).element_type
    argument.set_type(wide)
    _narrow_readers(argument, body(update), narrow)


def _narrow_readers(value: ir.Value, block: ir.Block, narrow: ir.Type) -> None:
    """Converts a value that has become wide for its readers, except for converts to wide types.

    Moves on the way to such converts become wide, too.
    """
    type_ = ir.RankedTensorType(value.type)
    readers = [use.owner for use in value.uses]
    direct = [reader for reader in readers if _widens(reader, narrow)]
    moves = [reader for reader in readers if _moves_to_widen(reader, narrow)]
    if len(direct) + len(moves) < len(readers):
        first = first_reader(value, block)
        with ir.InsertionPoint(first), first.location:
            back = _convert(value, ir.RankedTensorType.get(type_.shape, narrow))
        others = [back.operation, *(reader.operation for reader in (*direct, *moves))]
        value.replace_all_uses_except(back.result, others)
    for reader in direct:
        if reader.results[0].type == type_:
            reader.results[0].replace_all_uses_with(value)
            reader.operation.erase()
    for reader in moves:
        (result,) = reader.results
        shape = ir.RankedTensorType(result.type).shape
        result.set_type(ir.RankedTensorType.get(shape, type_.element_type))
        _narrow_readers(result, block, narrow)


def _widens(op: ir.OpView, narrow: ir.Type) -> bool:
    """Whether an op converts to floats of more bits."""
    if not isinstance(op, stablehlo.ConvertOp):
        return False
    element = ir.RankedTensorType(op.result.type).element_type
    return isinstance(element, ir.FloatType) and element_bytes(element) > element_bytes(narrow)


def _moves_to_widen(op: ir.OpView, narrow: ir.Type) -> bool:
    """Whether an op only moves elements, and a convert to more bits reads the result."""
    if not isinstance(op, _MOVES):
        return False
    users = [use.owner for use in op.results[0].uses]
    return any(_widens(user, narrow) or _moves_to_widen(user, narrow) for user in users)


def _convert(value: ir.Value, type_: ir.RankedTensorType) -> stablehlo.ConvertOp:
    op = stablehlo.ConvertOp(type_, value)
    op.attributes[FOLLOW] = i64(0)
    return op
