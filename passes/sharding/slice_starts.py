"""Writes the bounds of the starts of dynamic slices and gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from alpa.dialects import body, filled, ir, sdy, stablehlo, terminator
from alpa.passes.analysis.micro_batches.shapes import splat_of
from alpa.passes.analysis.op_kinds import ELEMENTWISE

# Their results are elements of their first operand.
_MOVES = (
    sdy.ShardingConstraintOp,
    stablehlo.BroadcastInDimOp,
    stablehlo.PadOp,
    stablehlo.ReshapeOp,
    stablehlo.ReverseOp,
    stablehlo.SliceOp,
    stablehlo.TransposeOp,
)


@dataclass(frozen=True)
class Slices:
    """The values of a module that are dynamic slices or gathers, and those that XLA may make them.

    It moves slices through ops that only move elements, drops ops that change none, hoists slices
    out of loops, and takes branches that are decided.
    """

    _others: set[ir.Value] = field(default_factory=set[ir.Value])
    """The values that are known to be none."""

    def may_have(self, value: ir.Value) -> bool:
        seen, waiting = set[ir.Value](), [value]
        while waiting:
            value = waiting.pop()
            if value in seen or value in self._others:
                continue
            if isinstance(_maker(value), stablehlo.DynamicSliceOp | stablehlo.GatherOp):
                return True
            seen.add(value)
            waiting += _same_elements(value)
        self._others.update(seen)
        return False


def bound_starts(op: stablehlo.DynamicSliceOp, slices: Slices) -> None:
    """Clamps the starts of a slice along dimensions where it has several elements, and all starts
    of a slice of what may be a slice.

    StableHLO bounds starts by itself. But where a device takes a shard of the slice, or a program
    slices a slice, XLA (jaxlib 0.10.2) makes one slice of both and bounds the sum of their starts,
    instead of each of them.
    """
    whole, part = (ir.RankedTensorType(v.type).shape for v in (op.operand, op.result))
    for d, (size, taken) in enumerate(zip(whole, part, strict=True)):
        start, last = op.start_indices[d], size - taken
        if not _is_within(start, last) and (taken > 1 or slices.may_have(op.operand)):
            with ir.InsertionPoint(op), op.location:
                bounded = _bounded(start, [last], 0) if last else filled(start.type, 0)
                op.operands[1 + d] = bounded


def bound_gather(op: stablehlo.GatherOp, slices: Slices) -> None:
    """Clamps the starts of a gather that takes slices of several elements along a dimension which
    its indices number, or that reads what may be a slice. A gather of one index is a dynamic slice
    to XLA."""
    numbers = stablehlo.GatherDimensionNumbers(op.dimension_numbers)
    numbered, vector = numbers.start_index_map, numbers.index_vector_dim
    shape, taken = ir.RankedTensorType(op.operand.type).shape, list(op.slice_sizes)
    if all(taken[d] <= 1 for d in numbered) and not slices.may_have(op.operand):
        return
    last = [shape[d] - taken[d] for d in numbered]
    with ir.InsertionPoint(op), op.location:
        op.operands[1] = _bounded(op.start_indices, last, vector)


def _bounded(starts: ir.Value, last: Sequence[int], vector: int) -> ir.Value:
    """Starts within 0 and the last ones, whose numbers are along the dimension `vector`; there is
    one number where the starts have no such dimension."""
    type_ = ir.RankedTensorType(starts.type)
    element = ir.IntegerType(type_.element_type)
    scalar = ir.RankedTensorType.get((), element)
    largest = 2 ** (element.width - (not element.is_unsigned)) - 1
    zero = filled(scalar, 0)
    limits = [ir.IntegerAttr.get(element, min(it, largest)) for it in last]
    if vector == type_.rank:
        (limit,) = limits
        most = stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, limit))
    else:
        row = ir.RankedTensorType.get((len(limits),), element)
        most = stablehlo.constant(ir.DenseElementsAttr.get(limits, row))
        most = stablehlo.broadcast_in_dim(type_, most, ir.DenseI64ArrayAttr.get([vector]))
    return stablehlo.clamp(zero, starts, most)


def _same_elements(value: ir.Value) -> Sequence[ir.Value]:
    """The values whose elements a value may have once XLA has simplified its op."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return _entering(owner.owner.opview, ir.BlockArgument(value).arg_number)
    op, number = owner.opview, ir.OpResult(value).result_number
    if op.operation.name in ELEMENTWISE:
        # XLA drops such an op only if all but one operand are constants, as in x * 1.
        read = {it for it in op.operands if not _is_constant(it)}
        decided = isinstance(op, stablehlo.SelectOp) and _is_constant(op.pred)
        return list(read) if decided or len(read) == 1 else ()
    match op:
        case stablehlo.WhileOp():
            return op.operands[number], terminator(body(op, 1)).operands[number]
        case stablehlo.CaseOp() | stablehlo.IfOp() | sdy.ManualComputationOp():
            blocks = [region.blocks[0] for region in op.regions]
            return [terminator(block).operands[number] for block in blocks]
        case stablehlo.OptimizationBarrierOp():
            return [op.operands[number]]
        case stablehlo.ConcatenateOp():
            return list(op.operands)
        case stablehlo.DynamicUpdateSliceOp():
            return [op.update] if op.update.type == op.operand.type else ()
        case stablehlo.ReduceOp():
            return [op.operands[number]] if _size(op.operands[number]) == _size(value) else ()
        case _:
            return [op.operands[0]] if isinstance(op, _MOVES) else ()


def _entering(op: ir.OpView, number: int) -> Sequence[ir.Value]:
    """The values that an argument of an op's region may be."""
    match op:
        case stablehlo.WhileOp():
            return op.operands[number], terminator(body(op, 1)).operands[number]
        case sdy.ManualComputationOp():
            return [op.operands[number]]
        case _:
            return ()


def _is_constant(value: ir.Value) -> bool:
    maker = _maker(value)
    while isinstance(maker, _MOVES):
        maker = _maker(maker.operands[0])
    return isinstance(maker, stablehlo.ConstantOp)


def _maker(value: ir.Value) -> ir.OpView | None:
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.opview


def _size(value: ir.Value) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


def _is_within(start: ir.Value, last: int) -> bool:
    maker = _maker(start)
    if not isinstance(maker, stablehlo.ConstantOp):
        return False
    number = splat_of(maker.attributes["value"])
    return number is not None and 0 <= number <= last
