"""Finds the relations of all values of a program to the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from alpa.dialects import body, ir, mpmd, terminator
from alpa.dialects.attributes import GRADIENT, LAYER_BOUNDARY, call_target, read_part
from alpa.passes.analysis.graph import has_effects, used_values
from alpa.passes.analysis.op_kinds import ELEMENTWISE, SHARDING_CALLS, SOURCES
from alpa.passes.analysis.tokens import contractions, moves
from alpa.passes.analysis.tokens.context import Operands, TokenContext
from alpa.passes.analysis.tokens.elementwise import elementwise
from alpa.passes.analysis.tokens.numbers import Numbers
from alpa.passes.analysis.tokens.relation import FIXED, TokenRelation, mixing, tokens

_Rule = Callable[[TokenContext, ir.OpView, Operands], TokenRelation | Sequence[TokenRelation]]
_HANDED_ON = (GRADIENT, LAYER_BOUNDARY, *SHARDING_CALLS)


def relate(block: ir.Block, dims: Mapping[int, int]) -> TokenContext:
    """The relations of all values of a block.

    Named computations, fragments and transfers are looked into, but not updates, which read sums
    over the tokens. Ops with other regions, such as loops, may not read what the tokens make.

    Args:
        block: the body of a function without calls.
        dims: the dimension with the tokens of each argument that has one, by its number.
    """
    same_as: dict[ir.Value, ir.Value] = {}
    context = TokenContext(same_as=same_as, numbers=Numbers(same_as))
    for number, argument in enumerate(block.arguments):
        context.relations[argument] = tokens(dims[number]) if number in dims else FIXED
    _walk(context, block)
    return context


def _walk(context: TokenContext, block: ir.Block) -> None:
    for op in list(block.operations)[:-1]:
        if isinstance(op, mpmd.FragmentOp) and read_part(op) == "update":
            context.relations.update(dict.fromkeys(op.results, FIXED))
        elif isinstance(op, mpmd.FragmentOp | mpmd.NamedComputationOp):
            inner = body(op)
            _hand_on(context, op.operands, inner.arguments)
            _walk(context, inner)
            _hand_on(context, terminator(inner).operands, op.results)
        elif _hands_on(op):
            _hand_on(context, op.operands, op.results)
        else:
            found = _related(context, op)
            context.relations.update(zip(op.results, found, strict=True))


def _hands_on(op: ir.OpView) -> bool:
    """Whether an op's results are its operands."""
    return (
        isinstance(op, mpmd.TransferOp)
        or op.operation.name in ("stablehlo.optimization_barrier", "sdy.sharding_constraint")
        or call_target(op) in _HANDED_ON
    )


def _hand_on(context: TokenContext, values: Sequence[ir.Value], others: Sequence[ir.Value]) -> None:
    for value, other in zip(values, others, strict=True):
        context.relations[other] = context.at(value)
        context.same_as[other] = value


def _related(context: TokenContext, op: ir.OpView) -> Sequence[TokenRelation]:
    rule = _RULES.get(op.operation.name, _unknown)
    read = op.operands if rule is not _unknown else used_values(op)
    # What regions make themselves has no relation.
    operands = [context.relations[it] for it in read if it in context.relations]
    worst = next((it for it in operands if it.is_mixing), None)
    found = worst or rule(context, op, operands)
    return [found] * len(op.results) if isinstance(found, TokenRelation) else found


def _unknown(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    if all(it.is_fixed for it in operands) and not has_effects(op):
        return FIXED
    return mixing(op, "may read later tokens: nothing is known of how it does")


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(SOURCES, lambda _, __, ___: FIXED),
    "chlo.top_k": moves.along_others,
    "stablehlo.broadcast_in_dim": moves.broadcast_in_dim,
    "stablehlo.concatenate": moves.along_others,
    "stablehlo.dot": contractions.product,
    "stablehlo.dot_general": contractions.product,
    "stablehlo.gather": moves.gather,
    "stablehlo.pad": moves.along_others,
    "stablehlo.reduce": contractions.reduce,
    "stablehlo.reshape": moves.reshape,
    "stablehlo.reverse": moves.along_others,
    "stablehlo.scatter": moves.scatter,
    "stablehlo.slice": moves.along_others,
    "stablehlo.sort": moves.along_others,
    "stablehlo.transpose": moves.transpose,
}
