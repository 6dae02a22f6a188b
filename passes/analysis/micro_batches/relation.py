"""How a value of one micro-batch relates to the same value at the whole batch.

A program P is lowered at the size of one of B micro-batches; W is the same program at the size of
the whole batch. A value of P has the versions `m_0 … m_(B-1)`, one per micro-batch, and one value
`w` in W. Its relation is one of:

====================  ============================================================================
`same`                `w = B^power * m_i` for every i: it does not depend on the samples
`rows`                `w = B^power * concat(m_0, …, m_(B-1))` along dimension `dim`. Where `outer`
                      is not 1 the dimension is `outer` blocks, and the concatenation is in each
`sum`                 `w = B^power * (m_0 + … + m_(B-1))`; a mean has the power -1
`step`                a function of sums: there is no version of a micro-batch, and `w` is computed
                      once, from `w` of its operands
`size`                made of the batch's size alone: `w` is computed once, by W's own constants
`position`            the number of a sample in its micro-batch, along dimension `dim`
`mixed`               any other function of several samples; `reason` says which op made it
====================  ============================================================================

`free` are dimensions along which all elements are equal, in W too: a `same` value that is equal
along a dimension is also `rows` there. `splat` is the number that all elements are, where it is
known. A `same` value with a `dim` counts from 0 along it: in a program whose W is not known these
numbers may be those of samples.
`factors` are scalars of the step that `w` is to be multiplied by, with exponents 1 or -1: a linear
op may take them out of a micro-batch, where they are not yet known.
`random` says that the value is made of numbers that are drawn anew in each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from alpa.dialects import ir

Kind = Literal["same", "rows", "sum", "step", "size", "position", "mixed"]
Factors = tuple[tuple[ir.Value, int], ...]


@dataclass(frozen=True)
class Reason:
    """The op that mixes samples, and a sentence about it."""

    location: ir.Location
    op: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One row of the table above."""

    kind: Kind
    power: int = 0
    dim: int = -1
    outer: int = 1
    free: frozenset[int] = frozenset()
    splat: float | None = None
    factors: Factors = ()
    root: ir.Value | None = None
    """of a `sum`, `step` or `size` that is one number everywhere: a value that holds this number"""
    random: bool = False
    reason: Reason | None = None

    @property
    def is_mixed(self) -> bool:
        return self.kind == "mixed"

    @property
    def is_zero(self) -> bool:
        """Zero is every kind of value, multiplied by anything."""
        return self.splat == 0

    @property
    def of_samples(self) -> bool:
        """Whether each micro-batch has a version that is no sum."""
        return self.kind in ("rows", "position")

    @property
    def of_step(self) -> bool:
        """Whether `w` can be had once all micro-batches have run."""
        return self.kind in ("same", "sum", "step", "size")

    @property
    def is_plain(self) -> bool:
        """Whether `w` is the versions of the micro-batches, without a power or a factor."""
        return self.power == 0 and not self.factors

    @property
    def scaled(self) -> tuple[int, Factors]:
        """What the versions of the micro-batches are multiplied by."""
        return (self.power, self.factors)

    @property
    def counts(self) -> bool:
        """Whether it counts from 0 along `dim`, and is the same for all samples."""
        return self.kind == "same" and self.dim >= 0

    @property
    def is_uniform(self) -> bool:
        """Whether it is rows that are all equal."""
        return self.kind == "rows" and (self.dim in self.free or self.is_zero)

    def rows_at(self, dim: int, outer: int) -> bool:
        """Whether it is rows along this dimension, in so many blocks."""
        if self.kind == "rows":
            return self.dim == dim and (self.outer == outer or self.is_uniform)
        return self.kind == "same" and (dim in self.free or self.is_zero)

    def times(self, other: Relation) -> tuple[int, Factors]:
        """What the product of two values is multiplied by."""
        return (self.power + other.power, combined(self.factors, other.factors))

    def over(self, other: Relation) -> tuple[int, Factors]:
        """What the quotient of two values is multiplied by."""
        inverse = tuple((value, -exponent) for value, exponent in other.factors)
        return (self.power - other.power, combined(self.factors, inverse))

    def with_scale(self, scale: tuple[int, Factors]) -> Relation:
        return replace(self, power=scale[0], factors=scale[1])


SAME = Relation(kind="same")
STEP = Relation(kind="step")
SIZE = Relation(kind="size")


def rows_among(relations: Iterable[Relation]) -> Relation | None:
    """The rows that say where the samples are: ones that differ, if there are any."""
    rows = [it for it in relations if it.kind == "rows"]
    return next((it for it in rows if not it.is_uniform), rows[0] if rows else None)


def combined(left: Factors, right: Factors) -> Factors:
    """The product of factors, each once, in the order in which they came."""
    exponents: dict[ir.Value, int] = {}
    for value, exponent in (*left, *right):
        exponents[value] = exponents.get(value, 0) + exponent
    return tuple((value, exponent) for value, exponent in exponents.items() if exponent)


def mixed(op: ir.OpView, text: str) -> Relation:
    """The relation of what an op makes of several samples."""
    return Relation(kind="mixed", reason=Reason(op.location, op.operation.name, text))


def unknown(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The relation of what an op without a rule makes: nothing is known once it reads samples."""
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    is_random = any(it.random for it in operands)
    kinds = {it.kind for it in operands}
    if kinds <= {"same"} and all(it.is_plain for it in operands):
        return replace(SAME, random=is_random)
    if kinds <= {"same", "size"}:
        return replace(SIZE, random=is_random)
    if all(it.of_step for it in operands):
        return replace(STEP, random=is_random)
    return mixed(op, "may compute several samples together: nothing is known of how it does")
