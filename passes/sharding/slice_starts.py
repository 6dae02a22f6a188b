"""Writes the bounds of the starts of dynamic slices and gathers."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import filled, ir, sdy, stablehlo
from alpa.passes.analysis.micro_batches.shapes import splat_of


def bound_starts(op: stablehlo.DynamicSliceOp) -> None:
    """Clamps the starts of a slice along dimensions where it has several elements, and all starts
    of a slice of a slice.

    StableHLO bounds starts by itself. But where a device takes a shard of the slice, or a program
    slices a slice, XLA (jaxlib 0.10.2) makes one slice of both and bounds the sum of their starts,
    instead of each of them.
    """
    is_second = _is_slice(op.operand)
    whole, part = (ir.RankedTensorType(v.type).shape for v in (op.operand, op.result))
    for d, (size, taken) in enumerate(zip(whole, part, strict=True)):
        start, last = op.start_indices[d], size - taken
        if (taken > 1 or is_second) and not _is_within(start, last):
            with ir.InsertionPoint(op), op.location:
                bounded = _bounded(start, [last], 0) if last else filled(start.type, 0)
                op.operands[1 + d] = bounded


def bound_gather(op: stablehlo.GatherOp) -> None:
    """Clamps the starts of a gather that takes slices of several elements along a dimension which
    its indices number, or that reads a slice. A gather of one index is a dynamic slice to XLA."""
    numbers = stablehlo.GatherDimensionNumbers(op.dimension_numbers)
    numbered, vector = numbers.start_index_map, numbers.index_vector_dim
    shape, taken = ir.RankedTensorType(op.operand.type).shape, list(op.slice_sizes)
    if all(taken[d] <= 1 for d in numbered) and not _is_slice(op.operand):
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


def _is_slice(value: ir.Value) -> bool:
    """Whether a value is a dynamic slice or a gather, also one that was transposed, that has a
    constraint, or that a manual computation reads."""
    while True:
        maker = value.owner
        if isinstance(maker, ir.Block):
            reader = maker.owner.opview
            if not isinstance(reader, sdy.ManualComputationOp):
                return False
            value = reader.operands[ir.BlockArgument(value).arg_number]
        elif isinstance(maker.opview, stablehlo.TransposeOp | sdy.ShardingConstraintOp):
            value = maker.opview.operands[0]
        else:
            return isinstance(maker.opview, stablehlo.DynamicSliceOp | stablehlo.GatherOp)


def _is_within(start: ir.Value, last: int) -> bool:
    maker = start.owner
    if not isinstance(maker, ir.Operation | ir.OpView):
        return False
    if not isinstance(maker.opview, stablehlo.ConstantOp):
        return False
    number = splat_of(maker.attributes["value"])
    return number is not None and 0 <= number <= last
