"""Ops that do nothing, and chains that do in one op what they do in two.

All are exact, bit for bit: x + 0.0 is not x where x is -0.0, and f32 -> f16 -> f32 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.graph import shape
from alpa.passes.simplify.rewriter import Rewriter, element_type, producer, splat

Values = Sequence[ir.Value] | None
_Test = Callable[[float | int], bool]

# Bits of exponent and of mantissa: a format holds another exactly where it has no fewer of both.
_FLOAT_BITS = {
    "f8E4M3FN": (4, 3),
    "f8E5M2": (5, 2),
    "f16": (5, 10),
    "bf16": (8, 7),
    "f32": (8, 23),
    "f64": (11, 52),
}


# Pattern: reshape(x) : type(x) -> x
def reshape_to_same_type(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op)


# Pattern: reshape(reshape(x)) -> reshape(x)
def reshape_of_reshape(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.ReshapeOp)
    if inner is None:
        return None
    return [rewriter.new(stablehlo.ReshapeOp, op.results[0].type, inner.operands[0])]


# Pattern: reshape(broadcast_in_dim(x)) -> reshape(x), where dimensions of size 1 are all it adds
def reshape_of_unit_dims(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.BroadcastInDimOp)
    if inner is None:
        return None
    dims = _ints(inner, "broadcast_dimensions")
    x = inner.operands[0]
    if dims != sorted(dims) or math.prod(shape(x)) != math.prod(shape(op.results[0])):
        return None
    return [rewriter.new(stablehlo.ReshapeOp, op.results[0].type, x)]


# Pattern: transpose(x, [0, 1, ...]) -> x
def transpose_by_identity(op: ir.OpView, _: Rewriter) -> Values:
    permutation = _ints(op, "permutation")
    return list(op.operands) if permutation == sorted(permutation) else None


# Pattern: transpose(transpose(x, p), q) -> transpose(x, p[q])
def transpose_of_transpose(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.TransposeOp)
    if inner is None:
        return None
    first = _ints(inner, "permutation")
    both = [first[dim] for dim in _ints(op, "permutation")]
    return [rewriter.new(stablehlo.TransposeOp, inner.operands[0], both)]


# Pattern: convert(x) : type(x) -> x
def convert_to_same_type(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op)


# Pattern: convert(convert(x)) -> convert(x), where the inner one is exact
def convert_of_exact_convert(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.ConvertOp)
    if inner is None:
        return None
    x = inner.operands[0]
    source, through, target = (
        element_type(x),
        element_type(inner.results[0]),
        element_type(op.results[0]),
    )
    if not _holds_exactly(source, through):
        return None
    # Out of range, float to integer need not agree with the integer's own wrap-around.
    by_float = isinstance(source, ir.IntegerType) and not isinstance(through, ir.IntegerType)
    if by_float and isinstance(target, ir.IntegerType) and target != source:
        return None
    return [rewriter.new(stablehlo.ConvertOp, op.results[0].type, x)]


# Pattern: bitcast_convert(x) : type(x) -> x
def bitcast_to_same_type(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op)


# Pattern: broadcast_in_dim(x, [0, 1, ...]) : type(x) -> x
def broadcast_to_same_type(op: ir.OpView, _: Rewriter) -> Values:
    same = _operand_of_same_type(op)
    if same is None:
        return None
    dims = _ints(op, "broadcast_dimensions")
    return same if dims == sorted(dims) else None


# Pattern: broadcast_in_dim(broadcast_in_dim(x, p), q) -> broadcast_in_dim(x, q[p])
def broadcast_of_broadcast(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.BroadcastInDimOp)
    if inner is None:
        return None
    second = _ints(op, "broadcast_dimensions")
    both = [second[dim] for dim in _ints(inner, "broadcast_dimensions")]
    x = inner.operands[0]
    return [rewriter.new(stablehlo.BroadcastInDimOp, op.results[0].type, x, both)]


# Pattern: slice(x) : type(x) -> x
def slice_of_everything(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op)


# Pattern: dynamic_slice(x, ...) : type(x) -> x, since start indices are clamped
def dynamic_slice_of_everything(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op)


# Pattern: dynamic_update_slice(x, update : type(x), ...) -> update, since start indices are clamped
def dynamic_update_of_everything(op: ir.OpView, _: Rewriter) -> Values:
    return _operand_of_same_type(op, 1)


# Pattern: pad(x, value, low = 0, high = 0, interior = 0) -> x
def pad_by_nothing(op: ir.OpView, _: Rewriter) -> Values:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    return None if any(any(_ints(op, name)) for name in names) else [op.operands[0]]


# Pattern: concatenate(x) -> x
def concatenate_of_one(op: ir.OpView, _: Rewriter) -> Values:
    return list(op.operands) if len(op.operands) == 1 else None


# Pattern: reverse(x, dims of size 1 or none) -> x
def reverse_of_nothing(op: ir.OpView, _: Rewriter) -> Values:
    sizes = shape(op.operands[0])
    return list(op.operands) if all(sizes[d] == 1 for d in _ints(op, "dimensions")) else None


# Pattern: negate(negate(x)) -> x
def negate_of_negate(op: ir.OpView, _: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.NegOp)
    return None if inner is None else list(inner.operands)


# Pattern: not(not(x)) -> x
def not_of_not(op: ir.OpView, _: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.NotOp)
    return None if inner is None else list(inner.operands)


# Pattern: add(x, 0), add(0, x) -> x, for floats only where the zero is -0.0
def add_zero(op: ir.OpView, _: Rewriter) -> Values:
    return _without_neutral(op, lambda c: c == 0 and not _is_positive_zero(c))


# Pattern: subtract(x, 0) -> x, for floats only where the zero is +0.0
def subtract_zero(op: ir.OpView, _: Rewriter) -> Values:
    return _without_neutral(op, lambda c: c == 0 and not _is_negative_zero(c), right_only=True)


# Pattern: multiply(x, 1), multiply(1, x) -> x
def multiply_by_one(op: ir.OpView, _: Rewriter) -> Values:
    return _without_neutral(op, lambda c: c == 1)


# Pattern: divide(x, 1) -> x
def divide_by_one(op: ir.OpView, _: Rewriter) -> Values:
    return _without_neutral(op, lambda c: c == 1, right_only=True)


# Pattern: select(p, x, x) -> x
def select_of_equal_values(op: ir.OpView, _: Rewriter) -> Values:
    _predicate, yes, no = op.operands
    return [yes] if yes == no else None


# Pattern: select(true, x, y) -> x; select(false, x, y) -> y
def select_by_constant(op: ir.OpView, _: Rewriter) -> Values:
    predicate, yes, no = op.operands
    chosen = splat(predicate)
    return None if chosen is None else [yes if chosen else no]


# Pattern: get_tuple_element(tuple(x, y, ...), i) -> the i-th
def element_of_tuple(op: ir.OpView, _: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.TupleOp)
    if inner is None:
        return None
    return [inner.operands[ir.IntegerAttr(op.attributes["index"]).value]]


# Pattern: reduce(x, init) of no dimension by op -> op(broadcast_in_dim(init), x)
def reduce_over_nothing(op: ir.OpView, rewriter: Rewriter) -> Values:
    block = body(op)
    if _ints(op, "dimensions") or len(op.results) != 1 or len(block.operations) != 2:
        return None
    combiner = block.operations[0]
    arguments = list(block.arguments)
    operands = list(combiner.operands)
    plain = list(terminator(block).operands) == list(combiner.results)
    if not plain or operands not in (arguments, arguments[::-1]):
        return None
    x, init = op.operands
    if init.type != x.type:
        init = rewriter.new(stablehlo.BroadcastInDimOp, x.type, init, [])
    pair = [init, x] if operands == arguments else [x, init]
    name = combiner.operation.name
    return [rewriter.new(partial(ir.Operation.create, name, [x.type], pair))]


def _operand_of_same_type(op: ir.OpView, number: int = 0) -> Values:
    operand = op.operands[number]
    return [operand] if operand.type == op.results[0].type else None


def _without_neutral(op: ir.OpView, is_neutral: _Test, right_only: bool = False) -> Values:
    """The operand beside one that is filled with a neutral constant."""
    left, right = op.operands
    for x, other in ((left, right),) if right_only else ((left, right), (right, left)):
        constant = splat(other)
        if constant is not None and is_neutral(constant) and x.type == op.results[0].type:
            return [x]
    return None


def _is_positive_zero(number: float | int) -> bool:
    return isinstance(number, float) and math.copysign(1.0, number) > 0


def _is_negative_zero(number: float | int) -> bool:
    return isinstance(number, float) and math.copysign(1.0, number) < 0


def _holds_exactly(source: ir.Type, target: ir.Type) -> bool:
    """Whether every number of one element type is one of the other."""
    if isinstance(source, ir.IntegerType):
        # One bit is a truth value, 0 or 1.
        unsigned = source.is_unsigned or source.width == 1
        bits = source.width if unsigned else source.width - 1
        if not isinstance(target, ir.IntegerType):
            format_ = _FLOAT_BITS.get(str(target))
            return format_ is not None and bits <= format_[1] + 1 and 2 ** format_[0] > 2 * bits
        if target.is_unsigned or target.width == 1:
            return unsigned and bits <= target.width
        return bits <= target.width - 1
    ours, theirs = _FLOAT_BITS.get(str(source)), _FLOAT_BITS.get(str(target))
    if ours is None or theirs is None:
        return False
    return ours[0] <= theirs[0] and ours[1] <= theirs[1]


def _ints(op: ir.OpView, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name])) if name in op.attributes else []
