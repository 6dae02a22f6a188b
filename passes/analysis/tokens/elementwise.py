"""Rules of element-wise ops: tokens stay apart, pairs stay pairs, and masks say what is beyond."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf, isinf, isnan

from alpa.dialects import ir
from alpa.passes.analysis.graph import shape, splat
from alpa.passes.analysis.op_kinds import LINEAR, SUMS
from alpa.passes.analysis.tokens.context import Operands, TokenContext, first_late
from alpa.passes.analysis.tokens.relation import FIXED, TokenRelation, low, mixing, tokens


def elementwise(context: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    if all(it.is_fixed for it in operands):
        return FIXED
    if any(it.kind == "sum" for it in operands):
        return of_sums(op, operands)
    sizes = shape(op.results[0])
    pairs = zip(operands, op.operands, strict=True)
    if any(not it.is_fixed and shape(value) != sizes for it, value in pairs):
        return mixing(op, "takes one number for all tokens from one of them")
    dims = sorted({d for it in operands for d in it.dims})
    if len(dims) == 1:
        return tokens(dims[0], first_late(operands))
    if len(dims) > 2:
        return mixing(op, "combines three tokens")
    return _pairs(context, op, operands, dims)


def of_sums(op: ir.OpView, operands: Operands) -> TokenRelation:
    """What an op makes of sums over the tokens: another one if it is linear in them."""
    name = op.operation.name
    total = TokenRelation(kind="sum", late=first_late(operands))
    pairs = zip(operands, op.operands, strict=True)
    are_sums = [it.kind == "sum" or (it.is_fixed and splat(value) == 0) for it, value in pairs]
    fixed = [it.is_fixed for it in operands]
    if name in SUMS | LINEAR and all(are_sums):
        return total
    if name == "stablehlo.multiply" and any(fixed) and any(are_sums):
        return total
    if name == "stablehlo.divide" and are_sums[0] and fixed[1]:
        return total
    if name == "stablehlo.select" and fixed[0] and all(are_sums[1:]):
        return total
    return mixing(op, "computes with a sum over all tokens, and is not linear in it")


def _pairs(
    context: TokenContext, op: ir.OpView, operands: Operands, dims: list[int]
) -> TokenRelation:
    """Scores of queries and keys, with numbers of either."""
    alone = [it for it in operands if it.kind == "tokens"]
    # Late ones last: they stand for others of the same token.
    parts = {it.dims[0]: it for it in sorted(alone, key=lambda it: it.late is not None)}
    found = replace(context.pairs(op, dims, parts), late=first_late(operands))
    assert found.order is not None
    for it in operands:
        if it.order is not None and not found.order.join(it.order, differs=it.flipped):
            return mixing(op, "combines scores of attention whose queries are the others' keys")
    return replace(found, beyond=_beyond(context, op, operands, found))


def _beyond(
    context: TokenContext, op: ir.OpView, operands: Operands, found: TokenRelation
) -> float | None:
    """What the result is for keys after the query.

    If nothing says yet which dimension holds the queries, a mask does: the result is known for one
    order only.
    """
    if found.query is not None:
        return _one_order(context, op, operands, found.query, sum(found.dims) - found.query)
    first, second = found.dims
    known = {
        query: number
        for query, key in ((first, second), (second, first))
        if (number := _one_order(context, op, operands, query, key)) is not None
    }
    if len(known) != 1:
        return None
    ((query, number),) = known.items()
    found.settle(query)
    return number


def _one_order(
    context: TokenContext, op: ir.OpView, operands: Operands, query: int, key: int
) -> float | None:
    numbers: list[float | None] = []
    for it, value in zip(operands, op.operands, strict=True):
        number = it.beyond if it.kind == "pairs" else None
        if it.is_fixed:
            number = context.numbers.beyond(value, query, key) if shape(value) else splat(value)
        numbers.append(None if number is None else low(float(number)))
    made = _made(op.operation.name, numbers)
    return None if made is None or isnan(made) else low(made)


def _made(name: str, numbers: list[float | None]) -> float | None:
    """What an op makes of these numbers, where None is any finite number."""
    first = numbers[0]
    last = numbers[-1]
    if name == "stablehlo.select":
        if first is None:
            return numbers[1] if numbers[1] == last else None
        return numbers[1] if first else last
    if name in ("stablehlo.multiply", "stablehlo.and") and 0 in numbers:
        return 0.0
    if name == "stablehlo.divide" and first == 0 and last != 0:
        return 0.0
    if name == "stablehlo.add" and -inf in numbers and inf not in numbers:
        return -inf
    if name == "stablehlo.subtract" and first == -inf and (last is None or not isinf(last)):
        return -inf
    if first is None or last is None:
        return None
    if name == "stablehlo.exponential":
        return math.exp(first) if first < 700 else None
    if name in ("stablehlo.convert", "stablehlo.reduce_precision"):
        return first
    if name == "stablehlo.negate":
        return -first
    if name == "stablehlo.multiply":
        return first * last
    if name == "stablehlo.add":
        return first + last
    if name == "stablehlo.subtract":
        return first - last
    if name == "stablehlo.maximum":
        return max(first, last)
    if name == "stablehlo.minimum":
        return min(first, last)
    return None
