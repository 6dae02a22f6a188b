"""Writes the bounds of the starts of dynamic slices."""

from __future__ import annotations

from alpa.dialects import filled, ir, stablehlo
from alpa.passes.analysis.micro_batches.shapes import splat_of


def bound_starts(op: stablehlo.DynamicSliceOp) -> None:
    """Clamps the starts of a slice along dimensions where it has several elements.

    StableHLO bounds starts by itself. But where a device takes a shard of the slice, XLA (jaxlib
    0.10.2) makes one slice of both and bounds the sum of their starts, instead of each of them.
    """
    whole, part = (ir.RankedTensorType(v.type).shape for v in (op.operand, op.result))
    for d, (size, taken) in enumerate(zip(whole, part, strict=True)):
        start, last = op.start_indices[d], size - taken
        if taken > 1 and not _is_within(start, last):
            with ir.InsertionPoint(op), op.location:
                op.operands[1 + d] = _bounded(start, last)


def _is_within(start: ir.Value, last: int) -> bool:
    maker = start.owner
    if not isinstance(maker, ir.Operation | ir.OpView):
        return False
    if not isinstance(maker.opview, stablehlo.ConstantOp):
        return False
    number = splat_of(maker.attributes["value"])
    return number is not None and 0 <= number <= last


def _bounded(start: ir.Value, last: int) -> ir.Value:
    type_ = ir.RankedTensorType(start.type)
    element = ir.IntegerType(type_.element_type)
    largest = 2 ** (element.width - (not element.is_unsigned)) - 1
    if last == 0:
        return filled(type_, 0)
    return stablehlo.clamp(filled(type_, 0), start, filled(type_, min(last, largest)))
