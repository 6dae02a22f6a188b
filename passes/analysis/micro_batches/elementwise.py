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
    PLAIN,
    POSITIONS,
    SAME,
    SIZE,
    STEP,
    Relation,
    Scale,
    as_rows,
    common_scale,
    mixed,
    mixed_among,
    rows_among,
    scale_of_sums,
    uneven,
    unknown,
)
from alpa.passes.analysis.micro_batches.shapes import integer
from alpa.passes.analysis.op_kinds import LINEAR, SUMS

_KEEP_POWERS = frozenset({"stablehlo.maximum", "stablehlo.minimum", "stablehlo.abs"})
"""Ops that keep a positive number by which all operands are multiplied."""
_OF_COUNTS = replace(STEP, of_counts=True)
_COUNTS = (
    "makes a float of a function of a count of samples, and the size of the whole batch is not "
    "known: sums of floats are taken for parts of means, and counts are not"
)
_COUNT_IN_FLOATS = (
    "convert the count to a float before the function, as in jnp.maximum(n.astype(float), 1), or "
    "plan the step with alpa.parallelize, which knows the whole batch"
)


def elementwise(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The relation of an element-wise op's result; scalars among its operands are broadcast."""
    name = op.operation.name
    if name == "stablehlo.compare" and (known := _compared(context, op, operands)) is not None:
        return known
    if name == "stablehlo.select" and (chosen := operands[0].splat) is not None:
        return operands[1 if chosen else 2]
    if (worst := mixed_among(operands)) is not None:
        return worst
    full = context.shape(op.results[0])
    if any(context.shape(value) not in (full, ()) for value in op.operands):
        return unknown(op, operands)  # chlo's broadcasts, a bitcast to another size
    if any(it.of_samples for it in operands):
        operands = [_substitute(context, op, n, it, operands) for n, it in enumerate(operands)]
    free = frozenset(range(len(full)))
    for it, value in zip(operands, op.operands, strict=True):
        free &= it.free if context.shape(value) == full else free
    found = replace(_kind(context, op, operands), free=free)
    if _keeps_counts(op) and found.kind == "same":
        found = replace(found, dim=operands[0].dim)
    return replace(found, splat=_splat(op, found, operands))


def batch_norm_inference(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """Of `(x - mean) / sqrt(variance + epsilon) * scale + offset`, where all but x are numbers of
    the features. It is linear in x, mean and offset together."""
    feature = integer(op, "feature_index")
    others = frozenset(range(len(context.shape(op.results[0])))) - {feature}
    x, *numbers = operands
    spread = [x, *(_spread(it, feature, others) for it in numbers)]
    rows = rows_among(spread)
    if rows is None:
        return unknown(op, operands)
    if (problem := _beside_rows(op, rows, spread, [True] * len(spread))) is not None:
        return problem
    _, scale, offset, mean, variance = spread
    if not (scale.is_plain and variance.is_plain):
        return uneven(op, [scale, variance])
    found = as_rows(op, rows, [x, offset, mean], linear=True)
    return replace(found, free=frozenset.intersection(*(it.free for it in spread)))


def _spread(relation: Relation, feature: int, others: frozenset[int]) -> Relation:
    """The relation of numbers of the features, repeated along the other dimensions."""
    free = others | ({feature} if relation.free else set())
    return replace(relation, dim=feature if relation.of_samples else -1, free=free)


def _splat(op: ir.OpView, found: Relation, operands: Sequence[Relation]) -> float | None:
    """The number that all elements are: 0, or 1, which a change of type keeps."""
    name, zeros = op.operation.name, [it.is_zero for it in operands]
    if name == "stablehlo.multiply" and any(zeros):
        return 0
    if name in ("stablehlo.negate", "stablehlo.convert") and zeros[0]:
        return 0
    is_one = name == "stablehlo.convert" and operands[0].splat == 1
    return 1.0 if is_one and found.kind == "same" else None


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
        return _of_step(op, any(it.of_counts for it in operands))
    if "sum" in kinds:
        return _of_sums(context, op, operands)
    scale = _scale(op, operands)
    return SIZE if "size" in kinds or scale is None else SAME.with_scale(scale)


def _of_rows(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    first = rows_among(operands)
    assert first is not None
    arrays = [bool(context.shape(value)) for value in op.operands]
    if (problem := _beside_rows(op, first, operands, arrays)) is not None:
        return problem
    scale = _scale(op, operands)
    if scale is None:
        return uneven(op, operands)
    return replace(first, splat=None).with_scale(scale)


def _beside_rows(
    op: ir.OpView, rows: Relation, operands: Sequence[Relation], arrays: Sequence[bool]
) -> Relation | None:
    """A mixed relation if some operands, arrays or scalars, are not for each of the rows."""
    for it, is_array in zip(operands, arrays, strict=True):
        if it.kind in ("size", "sum", "step"):
            what = {
                "size": "a number made of the batch's size",
                "sum": "a sum over samples",
                "step": "a value computed from all samples",
            }[it.kind]
            return mixed(op, f"combines each sample with {what}")
        if is_array and not rows.are_in([it]):
            text = f"computes the samples along dimension {rows.dim} with an array of the same size"
            return mixed(op, f"{text} that does not hold the same samples")
    return None


def _of_sums(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """Linear functions of sums are sums; a mean plus what is the same is a mean, too."""
    name = op.operation.name
    kinds = [it.kind for it in operands]
    scale: Scale | None = None
    if "size" in kinds:
        return STEP
    if name == "stablehlo.multiply" and kinds.count("sum") == 1:
        scale = operands[0].times(operands[1])
    elif _is_quotient(op) and kinds == ["sum", "same"]:
        scale = operands[0].over(operands[1])
    elif _counts_in_floats(op):
        # The same as a sum of the converted numbers.
        return context.sum_of(op, operands[0].scaled)
    elif _is_linear(op):
        scale = operands[0].scaled
    elif name in SUMS:
        scale = scale_of_sums(operands)
    elif name == "stablehlo.select" and operands[0].is_fixed:
        scale = scale_of_sums(operands[1:])
    if scale is None:
        floats = any(is_float(value.type) for value in op.operands)
        return _of_step(op, not floats and context.sums_are_parts_of_means)
    return Relation(kind="sum").with_scale(scale)


def _of_step(op: ir.OpView, of_counts: bool) -> Relation:
    """A function of sums. One of counts stays one of integers: a float would be multiplied with
    parts of means, or divide them."""
    (result,) = op.results
    if not of_counts or is_bool(result.type):
        return STEP
    return mixed(op, _COUNTS, _COUNT_IN_FLOATS) if is_float(result.type) else _OF_COUNTS


def _of_positions(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The number of a sample passes type conversions."""
    if _keeps_counts(op):
        return operands[0]
    return mixed(op, POSITIONS)


def _scale(op: ir.OpView, operands: Sequence[Relation]) -> Scale | None:
    """What the result is multiplied by, None where the op is not linear in what operands are
    multiplied by."""
    name = op.operation.name
    if all(it.is_plain for it in operands):
        return PLAIN
    if name == "stablehlo.multiply":
        return operands[0].times(operands[1])
    if _is_quotient(op):
        return operands[0].over(operands[1])
    if _is_linear(op):
        return operands[0].scaled
    if name in SUMS:
        return common_scale(operands)
    if name == "stablehlo.select" and operands[0].is_plain:
        return common_scale(operands[1:])
    scale = common_scale(operands) if name in _KEEP_POWERS else None
    return None if scale is None or scale[1] else scale


def _is_linear(op: ir.OpView) -> bool:
    """Whether an op of one operand is linear."""
    if op.operation.name == "stablehlo.convert":
        return _is_linear_convert(op)
    return op.operation.name in LINEAR or op.operation.name == "sdy.sharding_constraint"


def _is_quotient(op: ir.OpView) -> bool:
    """Whether an op divides numbers that are not rounded to integers."""
    return op.operation.name == "stablehlo.divide" and is_float(op.results[0].type)


def _counts_in_floats(op: ir.OpView) -> bool:
    """Whether a linear op makes floats of integers."""
    return _is_linear(op) and is_float(op.results[0].type) and not is_float(op.operands[0].type)


def _is_linear_convert(op: ir.OpView) -> bool:
    """Whether a change of the type of numbers hardly changes the numbers.

    Integers of few bits may have overflowed, which a sum of wider numbers has not.
    """
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
