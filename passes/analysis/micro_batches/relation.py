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
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from alpa.dialects import file_position, ir

Kind = Literal["same", "rows", "sum", "step", "size", "position", "mixed"]
Factors = tuple[tuple[ir.Value, int], ...]
Scale = tuple[int, Factors]
"""a power of B and factors, as in `Relation`"""
PLAIN: Scale = (0, ())


@dataclass(frozen=True)
class Reason:
    """The op that mixes samples, a sentence about it, and what else a user can do, if anything."""

    location: ir.Location
    op: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """What a value is for another `shard_map` that reads its shards (`manual.py`)."""

    local: Relation
    """of each shard"""
    samples: tuple[str, ...]
    """the axes that split the samples"""
    axes: tuple[tuple[str, ...], ...]
    """the axes that split each dimension"""


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
    reason: Reason | None = None
    dealt: Dealt | None = None
    of_counts: bool = False
    """of a `step` of integers, in a program whose W is not known: it is a function of how many
    samples there are of a kind, while sums of floats are taken for parts of means"""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Relations are keys of what is known of ops."""
        return hash((self.kind, self.power, self.dim, self.free, self.splat, self.root))

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
    def scaled(self) -> Scale:
        """What the versions of the micro-batches are multiplied by."""
        return (self.power, self.factors)

    @property
    def is_plain(self) -> bool:
        """Whether `w` is the versions of the micro-batches, without a power or a factor."""
        return self.scaled == PLAIN

    @property
    def is_fixed(self) -> bool:
        """Whether `w` is what every micro-batch has."""
        return self.kind == "same" and self.is_plain

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

    def are_in(self, others: Iterable[Relation]) -> bool:
        """Whether all others are rows along the dimension of these rows, in as many blocks."""
        return all(it.rows_at(self.dim, self.outer) for it in others)

    def times(self, other: Relation) -> Scale:
        """What the product of two values is multiplied by."""
        return (self.power + other.power, combined(self.factors, other.factors))

    def over(self, other: Relation) -> Scale:
        """What the quotient of two values is multiplied by."""
        inverse = tuple((value, -exponent) for value, exponent in other.factors)
        return (self.power - other.power, combined(self.factors, inverse))

    def with_scale(self, scale: Scale) -> Relation:
        return replace(self, power=scale[0], factors=scale[1])


SAME = Relation(kind="same")
STEP = Relation(kind="step")
SIZE = Relation(kind="size")


def rows_among(relations: Iterable[Relation]) -> Relation | None:
    """The rows that say where the samples are: ones that differ, if there are any."""
    rows = [it for it in relations if it.kind == "rows"]
    return next((it for it in rows if not it.is_uniform), rows[0] if rows else None)


def mixed_among(relations: Iterable[Relation]) -> Relation | None:
    """The first relation that is mixed."""
    return next((it for it in relations if it.is_mixed), None)


def common_scale(terms: Iterable[Relation]) -> Scale | None:
    """What all terms are multiplied by; None where they differ in it. Zero agrees with all."""
    scales = {it.scaled for it in terms if not it.is_zero}
    return None if len(scales) > 1 else next(iter(scales), PLAIN)


def scale_of_sums(terms: Sequence[Relation]) -> Scale | None:
    """What a sum of sums is multiplied by, where a `same` value among them counts as a mean."""
    return common_scale(it if it.kind == "sum" else replace(it, power=it.power - 1) for it in terms)


def combined(left: Factors, right: Factors) -> Factors:
    """The product of factors, each once, in the order in which they came."""
    exponents: dict[ir.Value, int] = {}
    for value, exponent in (*left, *right):
        exponents[value] = exponents.get(value, 0) + exponent
    return tuple((value, exponent) for value, exponent in exponents.items() if exponent)


POSITIONS = (
    "computes with the numbers that samples have in the batch (arange), which differ from those in "
    "a micro-batch"
)


def mixed(op: ir.OpView, text: str, remedy: str = "") -> Relation:
    """The relation of what an op makes of several samples."""
    return Relation(kind="mixed", reason=Reason(op.location, op.operation.name, text, remedy))


def uneven(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The relation of what an op makes of samples that are multiplied by different numbers, or by
    one in which it is not linear.

    If a number is a function of all samples, the reason is at the op that makes it.
    """
    differ = common_scale(operands) is None
    remedy = _APART if differ else ""
    factor = next((value for it in operands for value, _ in it.factors), None)
    if factor is None and isinstance(
        ir.RankedTensorType(op.results[0].type).element_type, ir.IntegerType
    ):
        return mixed(op, "computes with the size of the batch, such as a place among the samples")
    if factor is None:
        what = (
            "combines what is divided by the number of samples with what is not, such as the "
            "gradients of a mean and of a sum"
            if differ
            else "is not linear in samples that are multiplied by a number that depends on the "
            "size of the batch"
        )
        return mixed(op, what, remedy)
    here = file_position(op.location)
    place = "" if here is None else f" ({here.filename}:{here.start_line})"
    what = (
        "combines samples that it multiplies with others that it does not"
        if differ
        else "is not linear in the samples that it multiplies"
    )
    name = op.operation.name.partition(".")[2]
    maker = op if isinstance(factor.owner, ir.Block) else factor.owner.opview
    return mixed(maker, f"makes a function of all samples, and {name}{place} {what}", remedy)


_APART = "if these are terms of a loss, differentiate them apart and add the gradients"


def once(operands: Iterable[Relation]) -> Relation:
    """The relation of what the step computes once, of values without samples."""
    return SIZE if {it.kind for it in operands} <= {"same", "size"} else STEP


def without_samples(
    joined: Sequence[Relation], others: Sequence[Relation] = (), *, linear: bool = False
) -> Relation:
    """The relation of a function of values without samples, linear in `joined` together or not."""
    scale = common_scale(joined)
    if scale is not None and all(it.is_fixed for it in others):
        if all(it.kind == "same" for it in joined) and (linear or scale == PLAIN):
            return SAME.with_scale(scale)
        if linear and all(it.kind == "sum" or (it.kind == "same" and it.is_zero) for it in joined):
            return Relation(kind="sum").with_scale(scale)
    return once((*joined, *others))


def as_rows(
    op: ir.OpView, rows: Relation, joined: Iterable[Relation], *, linear: bool = False
) -> Relation:
    """The relation of what an op makes for each sample, linear in `joined` together or not."""
    joined = [*joined]
    scale = common_scale(joined)
    if scale is None or not (linear or scale == PLAIN):
        return uneven(op, joined)
    return Relation(kind="rows", dim=rows.dim, outer=rows.outer).with_scale(scale)


def unknown(op: ir.OpView, operands: Sequence[Relation]) -> Relation:
    """The relation of what an op without a rule makes: nothing is known once it reads samples."""
    if all(it.of_step for it in operands):
        return without_samples(operands)
    counts = not any(it.kind == "rows" for it in operands)
    text = "may compute several samples together: nothing is known of how it does"
    return mixed_among(operands) or mixed(op, POSITIONS if counts else text)
