"""What the rules of all ops share: the relations found so far, and what they promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from alpa.dialects import ir
from alpa.passes.analysis.micro_batches.relation import Reason
from alpa.passes.analysis.tokens.numbers import Numbers
from alpa.passes.analysis.tokens.relation import Order, TokenRelation, mixing

Operands = Sequence[TokenRelation]


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A late operand of an op whose token has to be a query of the op's pairs."""

    op: ir.OpView
    pairs: TokenRelation
    dim: int


@dataclass(frozen=True, kw_only=True)
class TokenContext:
    """The relations of a program's values."""

    relations: dict[ir.Value, TokenRelation] = field(default_factory=dict[ir.Value, TokenRelation])
    same_as: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """results and arguments of fragments -> what they hand on"""
    numbers: Numbers
    promises: list[Promise] = field(default_factory=list[Promise])

    def at(self, value: ir.Value) -> TokenRelation:
        return self.relations[value]

    def pairs(
        self, op: ir.OpView, dims: Sequence[int], parts: Mapping[int, TokenRelation]
    ) -> TokenRelation:
        """Pairs of tokens at two dimensions, whose order nothing has said yet.

        `parts` are relations of tokens by the dimension of the result where they are.
        """
        first, second = sorted(dims)
        late = next((it.late for it in parts.values() if it.late is not None), None)
        found = TokenRelation(kind="pairs", dims=(first, second), order=Order(), late=late)
        for dim, part in parts.items():
            if part.late is not None:
                self.promises.append(Promise(op=op, pairs=found, dim=dim))
        return found

    def broken(self) -> Reason | None:
        """The first op that reads what is late of tokens that are no queries, as keys are."""
        for promise in self.promises:
            if promise.pairs.query != promise.dim:
                text = "reads cotangents of earlier tokens, whose later part is not known yet"
                return mixing(promise.op, text).reason
        return None


def moved(relation: TokenRelation, place: Callable[[int], int | None]) -> TokenRelation | None:
    """A relation whose dimensions are elsewhere; None if one of them is nowhere."""
    places = [place(d) for d in relation.dims]
    found = [d for d in places if d is not None]
    if len(found) != len(places):
        return None
    flipped = relation.flipped ^ (found != sorted(found))
    return replace(relation, dims=tuple(sorted(found)), flipped=flipped)


def first_late(operands: Operands) -> Reason | None:
    return next((it.late for it in operands if it.late is not None), None)
