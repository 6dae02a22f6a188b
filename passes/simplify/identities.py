"""Ops that do nothing, and chains that do in one op what they do in two.

All are exact, bit for bit: x + 0.0 is not x where x is -0.0, and f32 -> f16 -> f32 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from alpa.dialects import body, ir, stablehlo
from alpa.passes.analysis.graph import combiner, shape
from alpa.passes.simplify import batch_norm
from alpa.passes.simplify.control_flow import loop_of_no_trips, loop_of_one_trip, taken_branch
from alpa.passes.simplify.rewriter import Rewrite, Rewriter, element_type, producer

Values = Sequence[ir.Value] | None

# Sign, digits and bits of exponent. A format whose numbers all have these holds another exactly.
_FLOATS = {
    "f8E4M3FN": (1, 4, 4),
    "f8E5M2": (1, 3, 5),
    "f16": (1, 11, 5),
    "bf16": (1, 8, 8),
    "f32": (1, 24, 8),
    "f64": (1, 53, 11),
}


# Pattern: reshape(x) : type(x) -> x
# Pattern: convert(x) : type(x) -> x
# Pattern: bitcast_convert(x) : type(x) -> x
# Pattern: slice(x) : type(x) -> x
# Pattern: dynamic_slice(x, ...) : type(x) -> x, since start indices are clamped
def to_same_type(op: ir.OpView, _: Rewriter) -> Values:
    x = op.operands[0]
    return [x] if x.type == op.results[0].type else None


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


# Pattern: convert(convert(x)) -> convert(x), where the inner one is exact
def convert_of_exact_convert(op: ir.OpView, rewriter: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.ConvertOp)
    if inner is None:
        return None
    x = inner.operands[0]
    source, through, target = map(element_type, (x, inner.results[0], op.results[0]))
    if not _holds_exactly(source, through):
        return None
    # Out of range, float to integer need not agree with the integer's own wrap-around.
    by_float = isinstance(source, ir.IntegerType) and not isinstance(through, ir.IntegerType)
    if by_float and isinstance(target, ir.IntegerType) and target != source:
        return None
    return [rewriter.new(stablehlo.ConvertOp, op.results[0].type, x)]


# Pattern: broadcast_in_dim(x, [0, 1, ...]) : type(x) -> x
def broadcast_to_same_type(op: ir.OpView, rewriter: Rewriter) -> Values:
    same = to_same_type(op, rewriter)
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


# Pattern: dynamic_update_slice(x, update : type(x), ...) -> update, since start indices are clamped
def dynamic_update_of_everything(op: ir.OpView, _: Rewriter) -> Values:
    update = op.operands[1]
    return [update] if update.type == op.results[0].type else None


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
# Pattern: not(not(x)) -> x
def inverse_of_itself(op: ir.OpView, _: Rewriter) -> Values:
    inner = producer(op.operands[0], type(op))
    return None if inner is None else list(inner.operands)


# Pattern: add(x, 0), add(0, x) -> x, for floats only where the zero is -0.0
def add_zero(op: ir.OpView, rewriter: Rewriter) -> Values:
    return _without_neutral(op, rewriter, "0", "-0.0")


# Pattern: subtract(x, 0) -> x, for floats only where the zero is +0.0
def subtract_zero(op: ir.OpView, rewriter: Rewriter) -> Values:
    return _without_neutral(op, rewriter, "0", "0.0", right_only=True)


# Pattern: multiply(x, 1), multiply(1, x) -> x
def multiply_by_one(op: ir.OpView, rewriter: Rewriter) -> Values:
    return _without_neutral(op, rewriter, "1", "1.0")


# Pattern: divide(x, 1) -> x
def divide_by_one(op: ir.OpView, rewriter: Rewriter) -> Values:
    return _without_neutral(op, rewriter, "1", "1.0", right_only=True)


# Pattern: select(p, x, x) -> x
def select_of_equal_values(op: ir.OpView, _: Rewriter) -> Values:
    _predicate, yes, no = op.operands
    return [yes] if yes == no else None


# Pattern: select(true, x, y) -> x; select(false, x, y) -> y
def select_by_constant(op: ir.OpView, rewriter: Rewriter) -> Values:
    predicate, yes, no = op.operands
    chosen = rewriter.splat(predicate)
    return None if chosen is None else [yes if chosen else no]


# Pattern: get_tuple_element(tuple(x, y, ...), i) -> the i-th
def element_of_tuple(op: ir.OpView, _: Rewriter) -> Values:
    inner = producer(op.operands[0], stablehlo.TupleOp)
    if inner is None:
        return None
    return [inner.operands[ir.IntegerAttr(op.attributes["index"]).value]]


# Pattern: reduce(x, init) of no dimension by op -> op(broadcast_in_dim(init), x)
def reduce_over_nothing(op: ir.OpView, rewriter: Rewriter) -> Values:
    name = None if _ints(op, "dimensions") else combiner(op)
    if name is None:
        return None
    x, init = op.operands
    if init.type != x.type:
        init = rewriter.new(stablehlo.BroadcastInDimOp, x.type, init, [])
    first = body(op).operations[0].operands[0]
    pair = [init, x] if first == body(op).arguments[0] else [x, init]
    return [rewriter.new(partial(ir.Operation.create, name, [x.type], pair))]


def _without_neutral(
    op: ir.OpView, rewriter: Rewriter, *neutral: str, right_only: bool = False
) -> Values:
    """The operand beside one that is filled with a neutral constant, given as text: -0.0 == 0.0."""
    left, right = op.operands
    for x, other in ((left, right),) if right_only else ((left, right), (right, left)):
        if str(rewriter.splat(other)) in neutral and x.type == op.results[0].type:
            return [x]
    return None


def _holds_exactly(source: ir.Type, target: ir.Type) -> bool:
    """Whether every number of one element type is one of the other."""
    ours, theirs = _format(source), _format(target)
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else False


def _format(element: ir.Type) -> tuple[int, int, int] | None:
    if not isinstance(element, ir.IntegerType):
        return _FLOATS.get(str(element))
    # One bit is a truth value, 0 or 1.
    sign = int(not element.is_unsigned and element.width > 1)
    return sign, element.width - sign, 0


def _ints(op: ir.OpView, name: str) -> list[int]:
    return list(ir.DenseI64ArrayAttr(op.attributes[name])) if name in op.attributes else []


REWRITES: Mapping[str, tuple[Rewrite, ...]] = {
    "stablehlo.batch_norm_training": (batch_norm.batch_norm_training,),
    "stablehlo.batch_norm_inference": (batch_norm.batch_norm_inference,),
    "stablehlo.batch_norm_grad": (batch_norm.batch_norm_grad,),
    "stablehlo.reshape": (to_same_type, reshape_of_reshape, reshape_of_unit_dims),
    "stablehlo.transpose": (transpose_by_identity, transpose_of_transpose),
    "stablehlo.convert": (to_same_type, convert_of_exact_convert),
    "stablehlo.bitcast_convert": (to_same_type,),
    "stablehlo.broadcast_in_dim": (broadcast_to_same_type, broadcast_of_broadcast),
    "stablehlo.slice": (to_same_type,),
    "stablehlo.dynamic_slice": (to_same_type,),
    "stablehlo.dynamic_update_slice": (dynamic_update_of_everything,),
    "stablehlo.pad": (pad_by_nothing,),
    "stablehlo.concatenate": (concatenate_of_one,),
    "stablehlo.reverse": (reverse_of_nothing,),
    "stablehlo.negate": (inverse_of_itself,),
    "stablehlo.not": (inverse_of_itself,),
    "stablehlo.add": (add_zero,),
    "stablehlo.subtract": (subtract_zero,),
    "stablehlo.multiply": (multiply_by_one,),
    "stablehlo.divide": (divide_by_one,),
    "stablehlo.select": (select_of_equal_values, select_by_constant),
    "stablehlo.get_tuple_element": (element_of_tuple,),
    "stablehlo.reduce": (reduce_over_nothing,),
    "stablehlo.while": (loop_of_no_trips, loop_of_one_trip),
    "stablehlo.if": (taken_branch,),
    "stablehlo.case": (taken_branch,),
}
"""The rewrites of `simplify-trivial-ops`, by the op that they replace."""
