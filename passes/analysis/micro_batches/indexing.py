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
from alpa.dialects.records import entries
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
        found = without_samples([x], [indices], linear=True)
        return replace(found, free=frozenset(at for d, at in slices.places.items() if d in x.free))
    rows, dim = _samples(op, slices, own, indices, x)
    if rows.is_mixed:
        return rows
    if x.rows_at(dim, rows.outer) if dim is not None else x.kind == "same":
        return as_rows(op, rows, [x], linear=True)
    of_all = x.kind in ("sum", "step", "size")
    source = "what is made of all samples" if of_all else "an array of other samples"
    return mixed(op, f"picks for each sample from {source}")


def _samples(
    op: ir.OpView,
    slices: Slices,
    own: tuple[int, int] | None,
    indices: Relation,
    sliced: Relation,
) -> tuple[Relation, int | None]:
    """The relation of windows that hold the samples, and their dimension in the sliced array, None
    where it is one array for all samples. `sliced` are the sliced array's rows, if it has them."""
    if own is not None:
        return Relation(kind="rows", dim=slices.outer[own[1]]), own[0]
    if indices.of_samples:
        at = slices.outer.get(indices.dim)
        if indices.kind == "position" or not indices.is_plain:
            text = "rows by the numbers that samples have in the batch (arange)"
        elif at is None:
            text = "rows by all samples together"
        else:
            rows = Relation(kind="rows", dim=at, outer=indices.outer)
            return rows, slices.batching.get(indices.dim)
    else:
        at = slices.whole_places.get(sliced.dim)
        if at is not None and indices.is_fixed:
            return Relation(kind="rows", dim=at, outer=sliced.outer), sliced.dim
        text = "some of the samples"
    verb = "picks" if isinstance(op, stablehlo.GatherOp) else "writes"
    return mixed(op, f"{verb} {text}"), None


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
    joined = None if isinstance(left.owner, ir.Block) else left.owner.opview
    if not isinstance(joined, stablehlo.ConcatenateOp):
        return None
    along = integer(joined, "dimension")
    columns = [context.at(value) for value in joined.operands]
    dims = {it.dim for it in columns if it.kind == "position"}
    if len(dims) != 1 or any(context.shape(value)[along] != 1 for value in joined.operands):
        return None
    (dim,) = dims
    if not all(
        it.is_plain and (it.kind in ("position", "same") or it.rows_at(dim, 1)) for it in columns
    ):
        return None
    found = Relation(kind="rows", dim=dim)
    if direction == "GE" and context.at(right).is_zero:
        return found
    bounds = _bounds(context, right) if direction == "LE" else []
    size = context.shape(left)[dim]
    largest = (size - 1, size * context.num_micro_batches - 1)
    fits = len(bounds) == len(columns) and all(
        bound == largest if it.kind == "position" else bound[0] == bound[1]
        for it, bound in zip(columns, bounds, strict=True)
    )
    return found if fits else None


def _bounds(context: Context, value: ir.Value) -> list[tuple[int, int]]:
    """The numbers, in P and in W, of a constant vector that is broadcast along all but the last
    dimension; none where it is no such vector."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner.opview
        rank = len(context.shape(value))
        if isinstance(op, stablehlo.ConstantOp) and rank == 1:
            attr = op.attributes["value"]
            vectors = (attr, context.whole(op).get("value", attr))
            numbers = [[*a] for a in vectors if isinstance(a, ir.DenseIntElementsAttr)]
            return list(zip(*numbers, strict=True)) if len(numbers) == len(vectors) else []
        if not isinstance(op, stablehlo.BroadcastInDimOp):
            return []
        if rank - 1 not in integers(op, "broadcast_dimensions"):
            return []
        value = op.operands[0]
    return []


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
    joined, others, adds = [x, updates], [indices], combiner(op) == "stablehlo.add"
    linear = adds or replaces(op)
    if combiner(op) == "stablehlo.multiply" and updates.is_plain:
        # The scatter is linear in what it multiplies.
        joined, others, linear = [x], [indices, updates], True
    if own is None and not any(it.of_samples for it in (x, updates, indices)):
        found = without_samples(joined, others, linear=linear)
        whole = slices.whole_places.items()
        equal = frozenset(d for d, at in whole if d in x.free and at in updates.free)
        return replace(found, free=equal)
    dims = {at: dim for dim, at in slices.whole_places.items()}
    sliced = x if x.kind == "rows" else replace(updates, dim=dims.get(updates.dim, -1))
    rows, dim = _samples(op, slices, own, indices, sliced)
    if rows.is_mixed:
        return rows
    if not updates.rows_at(rows.dim, rows.outer):
        return mixed(op, "writes values that do not belong to one sample each")
    if dim is None:
        total = context.sum_of(op, updates.scaled)
        if adds and (x.is_zero or (x.kind == "sum" and x.scaled == total.scaled)):
            return total
        return mixed(op, "writes what several samples may write to one place")
    if x.rows_at(dim, rows.outer):
        return as_rows(op, replace(rows, dim=dim), joined, linear=linear)
    return mixed(op, "writes into an array that does not hold the same samples")


def replaces(op: ir.OpView) -> bool:
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


def approx_top_k(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """Of `@ApproxTopK`, as `jax.lax.approx_max_k` writes it: arrays, and a start of each."""
    config = op.attributes.get("mhlo.backend_config")
    dim = entries(config).get("reduction_dim") if isinstance(config, ir.DictAttr) else None
    if not isinstance(dim, ir.IntegerAttr):
        return unknown(op, operands)
    return apart(context, op, operands, [dim.value], "takes the largest of the samples")


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
    if rows is None and linear and len(operands) == 1 and operands[0].of_step:
        return without_samples(operands, linear=True)
    if rows is None:
        return unknown(op, operands)
    if rows.dim in together:
        return mixed(op, text)
    for it, value in zip(operands, op.operands, strict=True):
        if not (rows.are_in([it]) if context.shape(value) else it.is_fixed):
            return mixed(op, "computes the samples with an array that does not hold them")
    return as_rows(op, rows, operands, linear=linear)
