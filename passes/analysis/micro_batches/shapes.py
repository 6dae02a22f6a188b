"""Rules of ops that move elements: samples move as wholes, or are mixed."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from alpa.dialects import ir
from alpa.passes.analysis.micro_batches.context import Context, Shape, is_float, shape_text
from alpa.passes.analysis.micro_batches.relation import (
    STEP,
    Relation,
    as_rows,
    mixed,
    once,
    rows_among,
    without_samples,
)
from alpa.passes.analysis.micro_batches.whole import elements, is_arange
from alpa.passes.analysis.rows import unchanged_dims

Operands = Sequence[Relation]


def integer(op: ir.OpView, name: str) -> int:
    """A number attribute."""
    return ir.IntegerAttr(op.attributes[name]).value


def integers(op: ir.OpView, name: str) -> tuple[int, ...]:
    """An array attribute."""
    return tuple(ir.DenseI64ArrayAttr(op.attributes[name]))


def whole_integers(context: Context, op: ir.OpView, name: str) -> tuple[int, ...]:
    """An array attribute as it is in W."""
    attr = context.whole(op).get(name, op.attributes[name])
    return tuple(ir.DenseI64ArrayAttr(attr))


def broadcast_in_dim(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    (x,) = operands
    dims = integers(op, "broadcast_dimensions")
    before, after = context.shape(op.operands[0]), context.shape(op.results[0])
    grown = {d for n, d in enumerate(dims) if before[n] == 1 and after[d] != 1}
    (whole,) = context.whole_shapes(op)
    # With one sample per micro-batch, only the whole batch shows what is repeated.
    repeated = {d for n, d in enumerate(dims) if before[n] == 1 and whole[d] != 1 and n != x.dim}
    free = frozenset(range(len(after))) - frozenset(dims)
    free |= grown | repeated | {dims[n] for n in x.free}
    root = x.root if x.root is not None or before else op.operands[0]
    if x.of_samples and dims[x.dim] in grown and not x.is_uniform:
        return mixed(op, "repeats the samples of a batch of one sample")
    dim = dims[x.dim] if x.dim >= 0 else -1
    return replace(x, dim=dim, free=free, root=root if x.kind in ("sum", "step", "size") else None)


def transpose(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    (x,) = operands
    to = {old: new for new, old in enumerate(integers(op, "permutation"))}
    return replace(x, free=frozenset(to[d] for d in x.free), dim=to.get(x.dim, -1))


def reshape(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """The samples of a row-major array: `before` elements, then chunks that grow with the batch."""
    (x,) = operands
    old, new = context.shape(op.operands[0]), context.shape(op.results[0])
    free = _reshaped_free(old, new, x.free)
    if not x.of_samples:
        return replace(x, free=free, dim=unchanged_dims(old, new).get(x.dim, -1))
    position = _place(context, op, x, old, new)
    if position is None:
        return mixed(
            op,
            f"regroups the samples of {shape_text(old)} as {shape_text(new)}, so that each "
            "micro-batch holds other groups than the whole batch",
        )
    dim, outer = position
    if x.kind == "position" and (outer != 1 or old[x.dim] != new[dim]):
        return mixed(op, "regroups the numbers of samples")
    if x.dim not in x.free:
        free -= {dim}  # of one sample, which is equal to itself only
    return replace(x, dim=dim, outer=outer, free=free)


def _place(
    context: Context, op: ir.OpView, x: Relation, old: Shape, new: Shape
) -> tuple[int, int] | None:
    """The dimension that holds the samples after a reshape, and its blocks.

    If W is known, it is the dimension that grows. Otherwise it is the same dimension if no
    dimension in front of it changes. Failing that, it is the first one in front of which there are
    as many elements as before, or a divisor of them.
    """
    before = math.prod(old[: x.dim]) * x.outer
    (whole,) = context.whole_shapes(op)
    if context.whole_is_known:
        grown = [d for d, (a, b) in enumerate(zip(new, whole, strict=True)) if a != b]
        candidates = grown if len(grown) == 1 else []
    else:
        stays = x.dim < len(new) and new[: x.dim + 1] == old[: x.dim + 1]
        candidates = [d for d, size in enumerate(new) if size != 1] or list(range(len(new)))
        candidates = [x.dim, *candidates] if stays else candidates
        if math.prod(new) == before:  # one sample of one element, at the end
            candidates = list(range(len(new)))
    for dim in candidates:
        ahead = math.prod(new[:dim])
        outer = max(before // ahead, 1)
        if ahead * outer != before or new[dim] % outer:
            continue
        keeps = context.whole_is_known or new[dim] // outer % context.samples == 0
        # The samples' own elements must not be cut by what lies in front of the dimension.
        if keeps and (outer == 1 or new[dim] > 1):
            return dim, outer
    return None


def _reshaped_free(old: Shape, new: Shape, free: frozenset[int]) -> frozenset[int]:
    """The dimensions along which a reshaped array is equal: those that stay, and what is equal
    as a whole."""
    if len(free) == len(old):
        return frozenset(range(len(new)))
    stay = {place for d, place in unchanged_dims(old, new).items() if d in free}
    return frozenset(d for d, size in enumerate(new) if size == 1 or d in stay)


def concatenate(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    along = integer(op, "dimension")
    free = operands[0].free.intersection(*(it.free for it in operands)) - {along}
    return replace(_joined(context, op, operands, along), free=free)


def _joined(context: Context, op: ir.OpView, operands: Operands, along: int) -> Relation:
    rows = rows_among(operands)
    if rows is None:
        return without_samples(operands, linear=True)
    if not {it.kind for it in operands} <= {"rows", "same"}:
        return mixed(op, "joins samples with what is made of all samples, or of their number")
    if along != rows.dim:
        if rows.are_in(operands):
            return as_rows(op, rows, operands, linear=True)
        return mixed(op, f"joins the samples along dimension {rows.dim} with other arrays")
    blocks = {
        context.shape(value)[along] // it.outer
        for it, value in zip(operands, op.operands, strict=True)
    }
    if all(it.kind == "rows" and it.dim == along for it in operands) and len(blocks) == 1:
        joined = replace(rows, outer=sum(it.outer for it in operands))
        return as_rows(op, joined, operands, linear=True)
    return mixed(op, "joins the samples with other rows along the batch's dimension")


def slice_(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    (x,) = operands
    starts, limits = integers(op, "start_indices"), integers(op, "limit_indices")
    strides = integers(op, "strides")
    shape = context.shape(op.operands[0])
    pieces = list(zip(starts, limits, strict=True))
    whole_starts = whole_integers(context, op, "start_indices")
    wholes = list(zip(whole_starts, whole_integers(context, op, "limit_indices"), strict=True))
    free = x.free | ({x.dim} if x.of_samples else set())
    others = [d for d in range(len(shape)) if d not in free]
    if any(pieces[d] != wholes[d] for d in others):
        return by_size(op, x, "takes other elements for the whole batch than for a micro-batch")
    if not x.of_samples:
        d = x.dim
        starts_at_0 = d < 0 or (starts[d], strides[d]) == (0, 1)
        return x if starts_at_0 else replace(x, dim=-1)
    d = x.dim
    if (*pieces[d], strides[d]) == (0, shape[d], 1):
        return x
    block = shape[d] // x.outer
    grown = context.num_micro_batches if context.whole_is_known else 1
    fits = (
        starts[d] < limits[d]
        and strides[d] == 1
        and starts[d] % block == limits[d] % block == 0
        and wholes[d] == (starts[d] * grown, limits[d] * grown)
    )
    if not fits or x.kind == "position":
        return mixed(op, f"takes some of the samples (rows {starts[d]} to {limits[d]})")
    return replace(x, outer=(limits[d] - starts[d]) // block)


def by_size(op: ir.OpView, x: Relation, text: str) -> Relation:
    """Of an op on one array whose numbers depend on the size of the batch."""
    return once([x]) if x.of_step else mixed(op, text)


def pad(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, value = operands
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    amounts = zip(*(integers(op, name) for name in names), strict=True)
    padded = {d for d, amount in enumerate(amounts) if any(amount)}
    free = x.free - padded
    keeps = value.is_zero or (x.kind != "sum" and value.kind == "same" and x.scaled == value.scaled)
    if not keeps and x.of_step and value.of_step:
        return replace(STEP, free=free)
    if not keeps:
        return mixed(op, "pads samples with what is made of all samples, or of their number")
    if x.of_samples and x.dim in padded:
        return mixed(op, "pads the batch with other rows")
    dim = x.dim if x.of_samples else -1
    splat = 0 if x.is_zero and value.is_zero else None
    return replace(x, dim=dim, free=free, splat=splat, root=None)


def reverse(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    (x,) = operands
    if x.dim not in integers(op, "dimensions") or x.is_uniform:
        return x
    if x.of_samples:
        return mixed(op, "reverses the order of the samples")
    return replace(x, dim=-1)


def iota(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """Positions along the dimension that grows in W; in a file, whatever may be positions."""
    dim = integer(op, "iota_dimension")
    shape = context.shape(op.results[0])
    (whole,) = context.whole_shapes(op)
    others = frozenset(range(len(shape))) - {dim}
    if whole[dim] != shape[dim]:
        return Relation(kind="position", dim=dim, free=others)
    return Relation(kind="same", dim=dim, free=others)


def constant(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """A number that both sizes share, or that differs by a power of the number of micro-batches.

    No integer is multiplied by a negative power.
    """
    shape = context.shape(op.results[0])
    free = frozenset(range(len(shape)))
    differs = context.whole(op)
    if isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.ComplexType):
        return _complex(op, differs.get("value"), free)
    attr = op.attributes["value"]
    other = differs.get("value", attr)
    number, whole = splat_of(attr), splat_of(other)
    if "value" not in differs or (number is not None and str(number) == str(whole)):
        return Relation(kind="same", free=free if number is not None else free - free, splat=number)
    if is_arange(attr) and is_arange(other):
        return Relation(kind="position", dim=0)
    if number is None or whole is None or not number or not math.isfinite(whole / number):
        return Relation(kind="size")
    power = _power(whole / number, context.num_micro_batches, _precision(op.results[0].type))
    if power is None or (power < 0 and not is_float(op.results[0].type)):
        return Relation(kind="size", free=free)
    return Relation(kind="same", free=free, power=power)


def _complex(op: ir.OpView, whole: ir.Attribute | None, free: frozenset[int]) -> Relation:
    """Of a complex constant, whose elements are text: the same for both sizes, or not."""
    text = elements(op)
    number = _COMPLEX.fullmatch(text)
    free = free if number is not None else frozenset()
    if whole is not None and ir.StringAttr(whole).value != text:
        return Relation(kind="size", free=free)
    is_zero = number is not None and float(number[1]) == float(number[2]) == 0
    return Relation(kind="same", free=free, splat=0.0 if is_zero else None)


_COMPLEX = re.compile(r"<\((-?\d+\.\d+e[+-]\d+),(-?\d+\.\d+e[+-]\d+)\)>")
"""The text of a complex constant all of whose elements are one number."""


_PRECISION = {"f64": 1e-15, "f32": 3e-7, "f16": 1e-3, "bf16": 4e-3}


def _precision(type_: ir.Type) -> float:
    """The relative rounding error of a quotient of two numbers of a type; 0 for integers."""
    return _PRECISION.get(str(ir.RankedTensorType(type_).element_type), 0.0)


def _power(ratio: float, base: int, precision: float) -> int | None:
    """The exponent that makes the ratio of the base, but for rounding."""
    for exponent in (1, -1, 2, -2, 3, -3):
        if math.isclose(ratio, float(base) ** exponent, rel_tol=precision):
            return exponent
    return None


def splat_of(attr: ir.Attribute) -> float | None:
    """The number that all elements are."""
    if not isinstance(attr, ir.DenseElementsAttr) or not attr.is_splat:
        return None
    element = attr.get_splat_value()
    if isinstance(element, ir.FloatAttr | ir.IntegerAttr):
        return float(element.value)
    return float(element.value) if isinstance(element, ir.BoolAttr) else None
