"""Rules of ops that compute each element of the result of the elements at its place.

Samples stay apart in such an op. What has to be right is what the versions of the micro-batches are
multiplied by (`Relation.scaled`), which a linear op passes on and any other op does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.micro_batches.context import Context, is_bool, is_float
from alpa.passes.analysis.micro_batches.indexing import in_bounds
from alpa.passes.analysis.micro_batches.relation import (
    SAME,
    SIZE,
    STEP,
    Factors,
    Relation,
    mixed,
    rows_among,
    unknown,
)

_SUMS = frozenset({"stablehlo.add", "stablehlo.subtract", "stablehlo.complex"})
"""Linear in all operands together."""
_LINEAR = frozenset(
    {
        "stablehlo.negate",
        "stablehlo.real",
        "stablehlo.imag",
        "stablehlo.reduce_precision",
        "chlo.conj",
        "sdy.sharding_constraint",
    }
)
_KEEP_POWERS = frozenset({"stablehlo.maximum", "stablehlo.minimum", "stablehlo.abs"})
"""Of operands that are all multiplied by one positive number."""


def elementwise(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The relation of an element-wise op's result; scalars among its operands are broadcast."""
    name = op.operation.name
    if name == "stablehlo.compare" and (known := _compared(context, op, operands)) is not None:
        return known
    if name == "stablehlo.select":
        chosen = operands[0].splat
        if chosen is not None:
            return operands[1 if chosen else 2]
    if (worst := next((it for it in operands if it.is_mixed), None)) is not None:
        return worst
    full = context.shape(op.results[0])
    if any(context.shape(value) not in (full, ()) for value in op.operands):
        return unknown(op, operands)  # chlo's broadcasts, a bitcast to another size
    if any(it.of_samples for it in operands):
        operands = [_substitute(context, op, n, it, operands) for n, it in enumerate(operands)]
    free = frozenset(range(len(full)))
    for it, value in zip(operands, op.operands, strict=True):
        free &= it.free if context.shape(value) == full else free
    is_random = any(it.random for it in operands)
    found = replace(_kind(context, op, operands), free=free, random=is_random)
    if _keeps_counts(op) and found.kind == "same":
        found = replace(found, dim=operands[0].dim)
    return replace(found, splat=0 if _is_zero(op, operands) else _splat(op, found, operands))


def _is_zero(op: ir.OpView, operands: Sequence[Relation]) -> bool:
    name = op.operation.name
    if name == "stablehlo.multiply":
        return any(it.is_zero for it in operands)
    return name in ("stablehlo.negate", "stablehlo.convert") and operands[0].is_zero


def _splat(op: ir.OpView, found: Relation, operands: Sequence[Relation]) -> float | None:
    """The number that all elements are, which a change of type keeps if it is one in any type."""
    is_one = operands[0].splat == 1
    kept = op.operation.name == "stablehlo.convert" and found.kind == "same" and is_one
    return operands[0].splat if kept else None


def _keeps_counts(op: ir.OpView) -> bool:
    """Whether an op changes the type of integers, to one that holds the numbers of samples."""
    if op.operation.name != "stablehlo.convert":
        return False
    element = ir.RankedTensorType(op.results[0].type).element_type
    return isinstance(element, ir.IntegerType) and element.width >= 32


def _kind(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """What the result is, but for what all element-wise results have in common."""
    kinds = {it.kind for it in operands}
    if "position" in kinds:
        return _of_positions(op, operands)
    if "rows" in kinds:
        return _of_rows(context, op, operands)
    if "step" in kinds:
        return STEP
    if "sum" in kinds:
        return _of_sums(op, operands)
    scale = _scale(op, operands)
    return SIZE if "size" in kinds or scale is None else SAME.with_scale(scale)


def _of_rows(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    first = rows_among(operands)
    assert first is not None
    dim, outer = first.dim, first.outer
    for it, value in zip(operands, op.operands, strict=True):
        if it.kind in ("size", "sum", "step"):
            what = {
                "size": "numbers made of the batch's size",
                "sum": "a sum over samples",
                "step": "a function of all samples",
            }[it.kind]
            return mixed(op, f"computes samples with {what}")
        if context.shape(value) and not it.rows_at(dim, outer):
            return mixed(
                op,
                f"computes the samples along dimension {dim} with an array of the same size that "
                "does not hold the same samples",
            )
    scale = _scale(op, operands)
    if scale is None:
        taken_out = any(it.factors for it in operands)
        return mixed(op, _NOT_LINEAR if taken_out else _UNEVEN)
    return replace(first, splat=None).with_scale(scale)


_NOT_LINEAR = (
    "is not linear in a function of all samples by which they were multiplied, or adds what was "
    "multiplied by several such functions"
)
_UNEVEN = (
    "is not linear in a number that depends on the size of the batch, or adds numbers that depend "
    "on it in different ways"
)


def _of_sums(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """Linear functions of sums are sums; a mean plus what is the same is a mean, too."""
    name = op.operation.name
    sums = [it for it in operands if it.kind == "sum"]
    if any(it.kind == "size" for it in operands):
        return STEP
    found = Relation(kind="sum")
    if name == "stablehlo.multiply" and len(sums) == 1:
        return found.with_scale(operands[0].times(operands[1]))
    if _is_quotient(op) and operands[0].kind == "sum" and len(sums) == 1:
        return found.with_scale(operands[0].over(operands[1]))
    if name in _LINEAR or _is_linear_convert(op):
        return found.with_scale(sums[0].scaled)
    terms = operands
    if name == "stablehlo.select" and operands[0].kind == "same" and operands[0].is_plain:
        terms = operands[1:]
    elif name not in _SUMS:
        return STEP
    scales = {
        it.scaled if it.kind == "sum" else (it.power - 1, it.factors)
        for it in terms
        if not it.is_zero
    }
    return found.with_scale(scales.pop()) if len(scales) == 1 else STEP


def _of_positions(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The number of a sample passes type conversions."""
    if _keeps_counts(op):
        return operands[0]
    return mixed(
        op,
        "computes with the numbers that samples have in the batch (arange), which differ from "
        "those in a micro-batch",
    )


def _scale(op: ir.OpView, operands: Sequence[Relation]) -> tuple[int, Factors] | None:
    """What the result is multiplied by, None where the op is not linear in what operands are
    multiplied by."""
    name = op.operation.name
    if all(it.is_plain for it in operands):
        return (0, ())
    if name == "stablehlo.multiply":
        return operands[0].times(operands[1])
    if _is_quotient(op):
        return operands[0].over(operands[1])
    if name in _LINEAR or _is_linear_convert(op):
        return operands[0].scaled
    terms = operands
    if name == "stablehlo.select":
        if not operands[0].is_plain:
            return None
        terms = operands[1:]
    elif name == "stablehlo.clamp" or name not in _SUMS | _KEEP_POWERS:
        return None
    scales = {it.scaled for it in terms if not it.is_zero}
    if len(scales) > 1:
        return None
    scale = scales.pop() if scales else (0, ())
    return None if name in _KEEP_POWERS and scale[1] else scale


def _is_quotient(op: ir.OpView) -> bool:
    """Whether an op divides numbers that are not rounded to integers."""
    return op.operation.name == "stablehlo.divide" and is_float(op.results[0].type)


def _is_linear_convert(op: ir.OpView) -> bool:
    """Whether an op changes the type of numbers and hardly the numbers.

    Integers of few bits may have overflowed, which a sum of wider numbers has not.
    """
    if op.operation.name != "stablehlo.convert":
        return False
    before, after = op.operands[0].type, op.results[0].type
    if is_float(before):
        return is_float(after)
    element = ir.IntegerType(ir.RankedTensorType(before).element_type)
    narrows = not is_float(after) and _width(after) <= element.width
    return not is_bool(after) and (narrows or element.width >= 32)


def _width(type_: ir.Type) -> int:
    return ir.IntegerType(ir.RankedTensorType(type_).element_type).width


def _substitute(
    context: Context,
    op: ir.OpView,
    number: int,
    relation: Relation,
    operands: Sequence[Relation],
) -> Relation:
    """One in the place of a number of the step, by which the result is then multiplied.

    Only where samples are multiplied by it, divided by it, or replaced by it: elsewhere the operand
    stays as it is, and mixes.
    """
    name = op.operation.name
    others = [it for n, it in enumerate(operands) if n != number]
    linear = name in ("stablehlo.multiply", "stablehlo.divide") or (
        name == "stablehlo.select" and number > 0 and others[1].is_zero
    )
    return context.taken_out(op, number, relation) if linear else relation


def _compared(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation | None:
    """Numbers that count from 0 are not negative."""
    direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"]).value
    left, right = operands
    counts = left.kind == "position" or left.counts
    if counts and right.is_zero and direction in ("LT", "GE"):
        dims = frozenset(range(len(op.results[0].type.shape)))
        return Relation(kind="same", free=dims, splat=float(direction == "GE"))
    if left.is_mixed and direction in ("GE", "LE"):
        return in_bounds(context, op, direction)
    return None
