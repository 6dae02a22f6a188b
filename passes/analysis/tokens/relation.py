"""How a value depends on the tokens of a sequence.

==========  ====================================================================================
`fixed`     it does not depend on the tokens
`tokens`    row t along `dims[0]` belongs to token t. It depends on tokens up to t only, or, if it
            is `late`, on what all tokens make in the forward part and on cotangents from t on
`pairs`     element (q, k) along both `dims` belongs to the query q and the key k, as scores of
            attention do. It depends on what tokens q and k have. `beyond` is what all elements
            with k > q are, if it is known: 0 behind a causal mask, minus infinity for any number
            below `LOW`
`sum`       a sum over the tokens of what each of them has
`mixing`    any other function of several tokens; `reason` says which op made it
==========  ====================================================================================

A causal program cut at any token computes `tokens` row by row, `pairs` for the queries of a slice
and the keys up to its end, and `sum` slice by slice. `late` values are computed from the last slice
to the first: cotangents of keys and values add up what later queries send back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from alpa.dialects import ir
from alpa.passes.analysis.micro_batches.relation import Reason

Kind = Literal["fixed", "tokens", "pairs", "sum", "mixing"]
LOW = -1e4
"""Scores at or below it count as minus infinity: the exponential of their distance from a row's
maximum is 0. JAX masks with -inf, with the least number of a type (-65504 in f16) or 0.7 times it,
others with -1e9 or -1e4."""


class Order:
    """Which of two dimensions holds the queries. Several pairs may share one order."""

    def __init__(self) -> None:
        self._parent: tuple[Order, bool] | None = None
        self._first: bool | None = None

    @property
    def first(self) -> bool | None:
        """Whether the first dimension holds the queries; None if nothing says so."""
        root, differs = self._root()
        return None if root._first is None else root._first ^ differs

    def settle(self, first: bool) -> None:
        """Says which dimension holds the queries; nothing has said so before."""
        root, differs = self._root()
        root._first = first ^ differs

    def join(self, other: Order, *, differs: bool) -> bool:
        """Makes both the same order, or opposite ones; False if that contradicts what is known."""
        (left, left_differs), (right, right_differs) = self._root(), other._root()
        differs ^= left_differs ^ right_differs
        if left is right:
            return not differs
        if left._first is None:
            left._parent = (right, differs)
            return True
        if right._first is None:
            right._parent = (left, differs)
            return True
        return (left._first ^ differs) == right._first

    def _root(self) -> tuple[Order, bool]:
        at, differs = self, False
        while at._parent is not None:
            at, more = at._parent
            differs ^= more
        return at, differs


@dataclass(frozen=True, kw_only=True)
class TokenRelation:
    """One row of the table above."""

    kind: Kind
    dims: tuple[int, ...] = ()
    """ascending"""
    late: Reason | None = None
    """the first op that reads later tokens"""
    order: Order | None = None
    flipped: bool = False
    """whether `order` is that of the dimensions in the other order"""
    beyond: float | None = None
    reason: Reason | None = None

    @property
    def query(self) -> int | None:
        """Of pairs: the dimension of the queries, if it is known."""
        first = None if self.order is None else self.order.first
        return None if first is None else self.dims[0 if first ^ self.flipped else 1]

    @property
    def key(self) -> int | None:
        """Of pairs: the dimension of the keys, if it is known."""
        query = self.query
        return None if query is None else sum(self.dims) - query

    def settle(self, query: int) -> None:
        """Says which dimension of pairs holds the queries."""
        assert self.order is not None
        self.order.settle((query == self.dims[0]) ^ self.flipped)

    @property
    def is_fixed(self) -> bool:
        return self.kind == "fixed"

    @property
    def is_mixing(self) -> bool:
        return self.kind == "mixing"


FIXED = TokenRelation(kind="fixed")


def tokens(dim: int, late: Reason | None = None) -> TokenRelation:
    return TokenRelation(kind="tokens", dims=(dim,), late=late)


def mixing(op: ir.OpView, text: str) -> TokenRelation:
    """The relation of what an op makes of several tokens."""
    return TokenRelation(kind="mixing", reason=Reason(op.location, op.operation.name, text))


def low(number: float) -> float:
    """Minus infinity for a number that masks a score; others stay."""
    return -inf if number <= LOW else number
