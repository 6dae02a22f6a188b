"""Rules of gather, scatter, dynamic slices and sorts.

A gather reads, for each index, a slice of its operand. Samples stay apart where

* the operand is the same for all samples, and the indices are samples (an embedding);
* the indices are the same, and each slice holds all samples of the operand;
* the operand and the indices are samples, and each index reads its own sample: by batching
  dimensions, or by a column of indices that counts the samples (`x[arange(n), labels]`).

Scatters write in the same three ways.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import combiner
from alpa.passes.analysis.micro_batches.context import Context, Shape
from alpa.passes.analysis.micro_batches.relation import (
    Relation,
    as_rows,
    mixed,
    mixed_among,
    rows_among,
    unknown,
    without_samples,
)
from alpa.passes.analysis.micro_batches.shapes import integer, integers
from alpa.passes.analysis.micro_batches.slices import Slices

Operands = Sequence[Relation]


def gather(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, indices = operands
    slices = Slices.of(op)
    own = _own_samples(context, slices)
    if x.is_mixed or (indices.is_mixed and own is None):
        return x if x.is_mixed else indices
    if not x.of_samples and not indices.of_samples and own is None:
        return without_samples([x], [indices], linear=True)
    found = _read(op, x, indices, slices, own)
    return found if found.is_mixed else replace(found, free=frozenset(), splat=None)


def _read(
    op: ir.OpView, x: Relation, indices: Relation, slices: Slices, own: tuple[int, int] | None
) -> Relation:
    """A gather from samples, or by indices that are samples."""
    if own is not None:
        sliced_dim, index_dim = own
        if (x.kind, x.dim, x.outer) == ("rows", sliced_dim, 1):
            return replace(x, dim=slices.outer[index_dim])
        return mixed(op, "picks rows by the numbers of samples from an array of other rows")
    if not indices.of_samples:
        dim = slices.whole_places.get(x.dim)
        if dim is None or not indices.is_fixed:
            return mixed(op, "picks some of the samples")
        return replace(x, dim=dim)
    if indices.kind == "position" or not indices.is_plain:
        return mixed(op, "picks rows by the numbers that samples have in the batch (arange)")
    dim = slices.outer.get(indices.dim)
    if dim is None:
        return mixed(op, "picks rows by all samples together")
    found = Relation(kind="rows", dim=dim, outer=indices.outer).with_scale(x.scaled)
    if indices.dim in slices.batching:
        if x.rows_at(slices.batching[indices.dim], indices.outer):
            return found
        return mixed(op, "picks from each row of an array that does not hold the same samples")
    if x.kind == "same":
        return found
    if x.kind == "rows":
        return mixed(op, "picks for each sample rows of other samples")
    return mixed(op, "picks for each sample from what is made of all samples")


def _own_samples(context: Context, slices: Slices) -> tuple[int, int] | None:
    """The sliced dimension that a column of indices numbers sample by sample, and the dimension of
    the indices that holds the samples."""
    columns = slices.columns
    relations = [context.at(value) for value in columns]
    counts = [n for n, it in enumerate(relations) if it.kind == "position" or it.counts]
    if len(counts) != 1 or len(columns) != len(slices.numbered):
        return None
    (number,) = counts
    count, others = relations[number], [it for n, it in enumerate(relations) if n != number]
    rows = [it for it in others if it.kind == "rows"]
    if not all(it.is_fixed or it.kind == "rows" for it in others):
        return None
    if any((it.dim, it.outer) != (count.dim, 1) or not it.is_plain for it in rows):
        return None
    if not rows and count.kind != "position":
        return None
    sliced = slices.numbered[number]
    same_size = context.shape(slices.sliced)[sliced] == context.shape(columns[number])[count.dim]
    if count.dim not in slices.outer or not same_size or sliced not in slices.collapsed:
        return None
    return sliced, count.dim


def in_bounds(context: Context, op: ir.OpView, direction: str) -> Relation | None:
    """Of a comparison of indices with zero or with their largest values, as jnp makes it in
    front of a gather: numbers of samples pass it in a micro-batch as in the whole batch.

    None where there are none of these among the columns of the indices.
    """
    left, right = op.operands
    if isinstance(left.owner, ir.Block) or not isinstance(
        left.owner.opview, stablehlo.ConcatenateOp
    ):
        return None
    along = integer(left.owner.opview, "dimension")
    columns = [(value, context.at(value)) for value in left.owner.operands]
    counts = [(n, v, it) for n, (v, it) in enumerate(columns) if it.kind == "position"]
    if not counts or any(context.shape(value)[along] != 1 for value, _ in columns):
        return None
    dim = counts[0][2].dim
    apart = all(
        it.is_plain and (it.kind in ("position", "same") or it.rows_at(dim, 1)) for _, it in columns
    )
    if not apart or any(it.dim != dim for _, _, it in counts):
        return None
    found = Relation(kind="rows", dim=dim)
    if direction == "GE" and context.at(right).is_zero:
        return found
    bounds = _bounds(context, right) if direction == "LE" else None
    if bounds is None or len(bounds[0]) != len(columns):
        return None
    small, large = bounds
    for n, value, it in counts:
        size = context.shape(value)[it.dim]
        if (small[n], large[n]) != (size - 1, size * context.num_micro_batches - 1):
            return None
    others = set(range(len(columns))) - {n for n, _, _ in counts}
    return found if all(small[n] == large[n] for n in others) else None


def _bounds(context: Context, value: ir.Value) -> tuple[list[int], list[int]] | None:
    """A vector of integers that is broadcast along all but the last dimension, in P and in W."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner.opview
        if isinstance(op, stablehlo.ConstantOp):
            attrs = op.attributes["value"], context.whole(op).get("value", op.attributes["value"])
            vectors = [a for a in attrs if isinstance(a, ir.DenseIntElementsAttr)]
            if len(vectors) < 2 or len(context.shape(value)) != 1:
                return None
            return [*vectors[0]], [*vectors[1]]
        rank = len(context.shape(value))
        if not isinstance(op, stablehlo.BroadcastInDimOp) or rank - 1 not in integers(
            op, "broadcast_dimensions"
        ):
            return None
        value = op.operands[0]
    return None


def scatter(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    if len(op.results) != 1:
        known = all(it.of_step for it in operands)
        several = mixed_among(operands) or mixed(op, "writes several arrays at once")
        return without_samples(operands) if known else several
    x, indices, updates = operands
    slices = Slices.of(op)
    own = _own_samples(context, slices)
    read = [x, updates] if own is not None else [x, updates, indices]
    if (worst := mixed_among(read)) is not None:
        return worst
    if indices.of_samples and x.is_zero and combiner(op) == "stablehlo.add":
        # The scatter is linear in the number that it writes for each sample.
        updates = context.taken_out(op, 2, updates)
    return _written(context, op, (x, indices, updates), slices, own)


def _written(
    context: Context,
    op: ir.OpView,
    operands: tuple[Relation, Relation, Relation],
    slices: Slices,
    own: tuple[int, int] | None,
) -> Relation:
    x, indices, updates = operands
    joined = (x, updates)
    adds = combiner(op) == "stablehlo.add"
    linear = adds or _replaces(op)
    if own is not None:
        dim, at = own[0], slices.outer[own[1]]
        if x.rows_at(dim, 1) and updates.rows_at(at, 1):
            return as_rows(op, Relation(kind="rows", dim=dim), joined, linear=linear)
        return mixed(op, "writes rows by the numbers of samples into an array of other rows")
    if not any(it.of_samples for it in operands):
        return without_samples(joined, [indices], linear=linear)
    if indices.kind == "position":
        return mixed(op, "writes rows by the numbers that samples have in the batch (arange)")
    if indices.kind == "rows" and indices.is_plain:
        at = slices.outer.get(indices.dim)
        if at is None or not updates.rows_at(at, indices.outer):
            return mixed(op, "writes for all samples what is not theirs")
        dim = slices.batching.get(indices.dim)
        if dim is not None:
            if x.rows_at(dim, indices.outer):
                return as_rows(op, replace(indices, dim=dim), joined, linear=linear)
            return mixed(op, "writes into each row of an array that does not hold the same samples")
        total = context.sum_of(op, updates.scaled)
        if adds and (x.is_zero or (x.kind == "sum" and x.scaled == total.scaled)):
            return total
        return mixed(op, "writes what several samples may write to one place")
    rows = x if x.kind == "rows" else updates
    for dim, at in slices.whole_places.items():
        fits = x.rows_at(dim, rows.outer) and updates.rows_at(at, rows.outer)
        if fits and indices.is_fixed and rows.dim == (dim if rows is x else at):
            return as_rows(op, replace(rows, dim=dim), joined, linear=linear)
    return mixed(op, "writes to some of the samples")


def _replaces(op: ir.OpView) -> bool:
    """Whether a scatter writes its updates as they are."""
    block = op.regions[0].blocks[0]
    inner = list(block.operations)
    return len(inner) == 1 and inner[0].operands[0] == block.arguments[1]


def dynamic_slice(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, *starts = operands
    if not x.of_samples:
        return replace(without_samples([x], starts, linear=True), free=x.free)
    sizes, shape = integers(op, "slice_sizes"), context.shape(op.operands[0])
    fixed = all(it.is_fixed for it in starts)
    if not fixed or not _whole_dimension(context, sizes, shape, starts, x.dim):
        return mixed(op, "picks some of the samples")
    return x


def _whole_dimension(
    context: Context, sizes: Shape, shape: Shape, starts: Operands, dim: int
) -> bool:
    """Whether a slice holds all samples, and not by its index one sample of a batch of one."""
    alone = shape[dim] == 1 and not context.whole_is_known
    return sizes[dim] == shape[dim] and (not alone or starts[dim].is_zero)


def dynamic_update_slice(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, update = operands[:2]
    sizes, shape = context.shape(op.operands[1]), context.shape(op.operands[0])
    found = _updated(context, op, operands, sizes, shape)
    if found.kind == "same" and x.is_zero and update.is_zero:
        return replace(found, free=frozenset(range(len(shape))), splat=0)
    spanned = {d for d, (a, b) in enumerate(zip(shape, sizes, strict=True)) if a == b}
    return replace(found, free=x.free & update.free & spanned)


def _updated(
    context: Context, op: ir.OpView, operands: Operands, sizes: Shape, shape: Shape
) -> Relation:
    x, update, *starts = operands
    if not (x.of_samples or update.of_samples):
        return without_samples((x, update), starts, linear=True)
    rows = rows_among((x, update))
    if (
        rows is None
        or not all(it.is_fixed for it in starts)
        or not _whole_dimension(context, sizes, shape, starts, rows.dim)
        or not rows.are_in((x, update))
    ):
        return mixed(op, "writes to some of the samples")
    return as_rows(op, rows, (x, update), linear=True)


def sort(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    return apart(context, op, operands, [integer(op, "dimension")], "sorts the samples")


def top_k(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    last = len(context.shape(op.operands[0])) - 1
    return apart(context, op, operands, [last], "takes the largest of the samples")


def apart(
    context: Context,
    op: ir.OpView,
    operands: Operands,
    together: Container[int],
    text: str,
    *,
    linear: bool = False,
) -> Relation:
    """Of an op that computes the dimensions `together`, and apart along the others."""
    rows = rows_among(operands)
    if rows is None:
        return unknown(op, operands)
    if rows.dim in together:
        return mixed(op, text)
    for it, value in zip(operands, op.operands, strict=True):
        if not (rows.are_in([it]) if context.shape(value) else it.is_fixed):
            return mixed(op, "computes the samples with an array that does not hold them")
    return as_rows(op, rows, operands, linear=linear)
