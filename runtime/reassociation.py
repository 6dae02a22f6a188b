"""Rewrites a program to add in another order: mathematically equal, with other rounding errors.

Before: `%0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]`
After:  one `dot_general` of the first half of the contracted dimension, one of the second half,
        and their sum.

A parallel plan changes the order of a program's sums. So the distance between a program and this
version of it, on one device, estimates the noise of a plan.

- `dot`, `dot_general`, `convolution`: the contracted dimension is halved. A grouped convolution
  gets two kernels instead, each with zeros in place of the other's half.
- `reduce` with `add` or `multiply` of floats, `batch_norm_training`, `batch_norm_grad`: operands
  are reversed along a reduced dimension.

Other sums (`reduce_window`, `scatter`, sums over the trips of a loop) are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from alpa.dialects import ir, stablehlo, walk


def reassociate(module: ir.Module) -> int:
    """Rewrites the sums of a module in place, and returns their number."""
    count = 0
    for op in list(walk(module.body)):
        with op.operation.context, op.location, ir.InsertionPoint(op):
            count += _rewritten(op)
    return count


def _rewritten(op: ir.OpView) -> bool:
    if not all(_is_float(value) for value in op.operands):
        return False
    if isinstance(op, stablehlo.DotGeneralOp):
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        pairs = list(
            zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True)
        )
        return _halved(op, pairs)
    if isinstance(op, stablehlo.DotOp):
        return _halved(op, [(len(_shape(op.operands[0])) - 1, 0)])
    if isinstance(op, stablehlo.ConvolutionOp):
        return _convolution(op)
    if isinstance(op, stablehlo.ReduceOp):
        dims = list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        return _is_sum(op) and _reversed(op, [0], dims)
    if isinstance(op, stablehlo.BatchNormTrainingOp):
        return _reversed(op, [0], _all_but_feature(op), result=0)
    if isinstance(op, stablehlo.BatchNormGradOp):
        return _reversed(op, [0, 4], _all_but_feature(op), result=0)
    return False


def _convolution(op: stablehlo.ConvolutionOp) -> bool:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    groups = [
        ir.IntegerAttr(op.attributes[name]).value
        for name in ("feature_group_count", "batch_group_count")
    ]
    lhs, rhs = numbers.input_feature_dimension, numbers.kernel_input_feature_dimension
    if groups == [1, 1] and _halved(op, [(lhs, rhs)]):
        return True
    shape = _shape(op.operands[1])
    dims = [rhs, *numbers.kernel_spatial_dimensions]
    dim = max(dims, key=lambda d: shape[d])
    if shape[dim] < 2:
        return False
    halves = [_padded_half(op.operands[1], dim, second) for second in (False, True)]
    _add_both(op, [{1: half} for half in halves])
    return True


def _halved(op: ir.OpView, pairs: Sequence[tuple[int, int]]) -> bool:
    """Splits a contraction in two along the longest pair of contracted dimensions."""
    lhs, rhs = op.operands[0], op.operands[1]
    pair = max(pairs, key=lambda pair: _shape(lhs)[pair[0]], default=None)
    if pair is None or (size := _shape(lhs)[pair[0]]) < 2:
        return False
    cuts = ((0, size // 2), (size // 2, size))
    _add_both(op, [{0: _slice(lhs, pair[0], cut), 1: _slice(rhs, pair[1], cut)} for cut in cuts])
    return True


def _add_both(op: ir.OpView, operands: Sequence[dict[int, ir.Value]]) -> None:
    """Replaces an op by the sum of two copies with other operands."""
    copies: list[ir.Value] = []
    for given in operands:
        copy = op.operation.clone()
        for number, value in given.items():
            copy.operands[number] = value
        copies.append(copy.results[0])
    total = stablehlo.add(*copies)
    op.results[0].replace_all_uses_with(total)
    op.operation.erase()


def _reversed(
    op: ir.OpView, operands: Sequence[int], dims: Sequence[int], result: int | None = None
) -> bool:
    """Reverses operands along the longest of the dimensions, and a result back."""
    shape = _shape(op.operands[0])
    dim = max(dims, key=lambda d: shape[d], default=None)
    if dim is None or prod(shape[d] for d in dims) < 3:  # two addends have only one order
        return False
    along = ir.DenseI64ArrayAttr.get([dim])
    for number in operands:
        op.operation.operands[number] = stablehlo.reverse(op.operands[number], along)
    if result is not None:
        with ir.InsertionPoint.after(op.operation):
            back = stablehlo.reverse(op.results[result], along)
        op.results[result].replace_all_uses_except(back, back.owner.operation)
    return True


def _slice(value: ir.Value, dim: int, cut: tuple[int, int]) -> ir.Value:
    shape = _shape(value)
    start, limit = [0] * len(shape), list(shape)
    start[dim], limit[dim] = cut
    return stablehlo.slice(
        value,
        ir.DenseI64ArrayAttr.get(start),
        ir.DenseI64ArrayAttr.get(limit),
        ir.DenseI64ArrayAttr.get([1] * len(shape)),
    )


def _padded_half(value: ir.Value, dim: int, second: bool) -> ir.Value:
    """Half of a value along a dimension, with zeros in place of the other half."""
    shape = _shape(value)
    middle = shape[dim] // 2
    low, high = [0] * len(shape), [0] * len(shape)
    if second:
        low[dim], cut = middle, (middle, shape[dim])
    else:
        high[dim], cut = shape[dim] - middle, (0, middle)
    element = ir.RankedTensorType(value.type).element_type
    scalar = ir.RankedTensorType.get([], element)
    zero = stablehlo.constant(ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(element, 0)))
    return stablehlo.pad(
        _slice(value, dim, cut),
        zero,
        ir.DenseI64ArrayAttr.get(low),
        ir.DenseI64ArrayAttr.get(high),
        ir.DenseI64ArrayAttr.get([0] * len(shape)),
    )


def _is_sum(op: stablehlo.ReduceOp) -> bool:
    inner = list(op.regions[0].blocks[0].operations)
    return len(inner) == 2 and isinstance(inner[0], stablehlo.AddOp | stablehlo.MulOp)


def _all_but_feature(op: ir.OpView) -> list[int]:
    feature = ir.IntegerAttr(op.attributes["feature_index"]).value
    return [d for d in range(len(_shape(op.operands[0]))) if d != feature]


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _is_float(value: ir.Value) -> bool:
    type_ = value.type
    return isinstance(type_, ir.RankedTensorType) and isinstance(type_.element_type, ir.FloatType)
