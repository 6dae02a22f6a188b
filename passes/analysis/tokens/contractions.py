"""Rules of ops that sum: over the tokens, over the keys of a query, or over a key's queries."""

from __future__ import annotations

from math import inf

from alpa.dialects import ir
from alpa.passes.analysis.graph import combiner, splat
from alpa.passes.analysis.micro_batches.contractions import product_dims
from alpa.passes.analysis.micro_batches.relation import Reason
from alpa.passes.analysis.micro_batches.shapes import integers
from alpa.passes.analysis.tokens.context import Operands, TokenContext, first_late, moved
from alpa.passes.analysis.tokens.relation import FIXED, TokenRelation, mixing, tokens

_UNMASKED = "over keys after the query: no causal mask is in front of it"
_LATE = "adds up what later queries make for each key"
_NEUTRAL = {
    "stablehlo.add": 0.0,
    "stablehlo.maximum": -inf,
    "stablehlo.minimum": inf,
    "stablehlo.or": 0.0,
    "stablehlo.and": 1.0,
}
"""What changes nothing in a reduction."""


def reduce(context: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    inputs, starts = operands[: len(op.results)], operands[len(op.results) :]
    if not all(it.is_fixed for it in starts):
        return mixing(op, "starts from what the tokens make")
    if all(it.is_fixed for it in inputs):
        return FIXED
    dims = integers(op, "dimensions")
    (x, *others) = (it for it in inputs if not it.is_fixed)
    if any(it.dims != x.dims or it.kind != x.kind for it in others):
        return mixing(op, "reduces arrays together whose tokens are along other dimensions")
    by = combiner(op) if len(inputs) == 1 else None
    adds = by == "stablehlo.add" and splat(op.operands[1]) == 0
    if x.kind == "sum":
        return x if adds else mixing(op, "computes with a sum over all tokens, not by a sum")
    kept = {d: d - sum(other < d for other in dims) for d in x.dims if d not in dims}
    if len(kept) == len(x.dims):
        if len(inputs) > 1 and x.kind == "pairs":
            return mixing(op, "reduces scores of attention together with others")
        found = moved(x, kept.get)
        assert found is not None
        neutral = _NEUTRAL.get(by or "")
        beyond = x.beyond if x.beyond is not None and x.beyond == neutral else None
        return TokenRelation(
            kind=found.kind,
            dims=found.dims,
            late=first_late(inputs),
            order=found.order,
            flipped=found.flipped,
            beyond=beyond,
        )
    if x.kind == "tokens":
        if adds:
            return TokenRelation(kind="sum", late=x.late)
        return mixing(op, "reduces over all tokens, not by a sum")
    masked = x.beyond is not None and x.beyond == _NEUTRAL.get(by or "")
    if x.query is None or not masked:
        return mixing(op, f"reduces {_UNMASKED}")
    if not kept:
        return TokenRelation(kind="sum", late=x.late) if adds else mixing(op, "reduces all pairs")
    ((dim, place),) = kept.items()
    if dim == x.query:
        return tokens(place, x.late)
    if not adds:
        return mixing(op, "reduces over the queries of a key, not by a sum")
    return tokens(place, Reason(op.location, op.operation.name, _LATE))


def product(context: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    """A `dot` or a `dot_general`."""
    kinds = {it.kind for it in operands}
    if kinds == {"fixed"}:
        return FIXED
    if "sum" in kinds:
        if kinds == {"sum", "fixed"}:
            return TokenRelation(kind="sum", late=first_late(operands))
        return mixing(op, "multiplies by a sum over all tokens")
    batching, contracting, places = product_dims(op)
    if len(kinds) == 1 and "pairs" in kinds:
        return mixing(op, "multiplies scores of attention by others")
    # The operand with pairs, or else one with tokens, first.
    side = max((0, 1), key=lambda n: len(operands[n].dims))
    x, y = operands[side], operands[1 - side]
    own, other = places[side], places[1 - side]
    partner = {pair[side]: pair[1 - side] for pair in (*batching, *contracting)}
    summed = {pair[side] for pair in contracting}
    met = {d: partner[d] for d in x.dims if d in partner}
    if not y.is_fixed and not met and not any(d in partner.values() for d in y.dims):
        if x.kind == "pairs":
            return mixing(op, "combines three tokens")
        ends = {own[x.dims[0]]: x, other[y.dims[0]]: y}
        return context.pairs(op, list(ends), ends)
    if not y.is_fixed and (len(met) != 1 or list(met.values()) != list(y.dims)):
        return mixing(op, "multiplies tokens by other numbers of other tokens")
    return _met(context, op, x, y, own, summed & met.keys())


def _met(
    context: TokenContext,
    op: ir.OpView,
    x: TokenRelation,
    y: TokenRelation,
    own: dict[int, int],
    summed: set[int],
) -> TokenRelation:
    """A product with tokens along the same dimension, or with an array that has none.

    Args:
        own: where the dimensions of x that are not summed over are in the result.
        summed: the dimensions of x with tokens that are summed over.
    """
    late = first_late((x, y))
    if not summed:
        if x.kind == "pairs" and not y.is_fixed:
            return mixing(op, "multiplies scores of attention token by token")
        found = moved(x, own.get)
        assert found is not None
        beyond = 0.0 if x.beyond == 0 else None
        return TokenRelation(
            kind=found.kind,
            dims=found.dims,
            late=late,
            order=found.order,
            flipped=found.flipped,
            beyond=beyond,
        )
    if x.kind == "tokens":
        return TokenRelation(kind="sum", late=late)
    if x.query is None or x.beyond != 0:
        return mixing(op, f"multiplies and adds up {_UNMASKED}")
    if len(summed) == 2:
        return TokenRelation(kind="sum", late=late)
    (dim,) = summed
    if dim == x.query:
        reason = late or Reason(op.location, op.operation.name, _LATE)
        return tokens(own[sum(x.dims) - dim], reason)
    if y.late is not None:
        return mixing(op, "reads cotangents of earlier tokens, whose later part is not known yet")
    return tokens(own[x.query], x.late)
