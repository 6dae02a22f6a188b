"""Rules of gather, scatter, dynamic slices and sorts.

A gather reads, for each index, a slice of its operand. Samples stay apart where

* the operand is the same for all samples, and the indices are samples (an embedding);
* the indices are the same, and each slice holds all samples of the operand;
* the operand and the indices are samples, and each index reads its own sample: by batching
  dimensions, or by a column of indices that counts the samples (`x[arange(n), labels]`).

Scatters write in the same three ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.micro_batches.context import Context, Shape, is_float
from alpa.passes.analysis.micro_batches.contractions import combiner
from alpa.passes.analysis.micro_batches.relation import (
    SAME,
    SIZE,
    STEP,
    Factors,
    Relation,
    mixed,
    rows_among,
)
from alpa.passes.analysis.micro_batches.shapes import get_dimension, integers

Operands = Sequence[Relation]


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The dimension numbers of a gather, or of a scatter seen as the gather that undoes it.

    `sliced` is the array that is read or written by slices, `windows` the one that holds the
    slices; `window_dims` are its dimensions that run inside of a slice.
    """

    sliced: Shape
    window_dims: tuple[int, ...]
    collapsed: tuple[int, ...]
    sliced_batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    index_map: tuple[int, ...]
    vector_dim: int
    window_sizes: tuple[int, ...]
    index_rank: int
    window_rank: int

    @property
    def kept(self) -> list[int]:
        """The dimensions of the sliced array that windows have, in their order."""
        gone = {*self.collapsed, *self.sliced_batching}
        return [d for d in range(len(self.sliced)) if d not in gone]

    def window_of(self, dim: int) -> int | None:
        """Where a dimension of the sliced array is in the windows, if each holds all of it."""
        if dim not in self.kept or self.window_sizes[dim] != self.sliced[dim]:
            return None
        if dim in self.index_map and self.sliced[dim] == 1:
            return None
        return self.window_dims[self.kept.index(dim)]

    def batch_of(self, dim: int) -> int | None:
        """Where a dimension of the indices is in the windows."""
        if dim == self.vector_dim:
            return None
        outer = [d for d in range(self.window_rank) if d not in self.window_dims]
        dims = [d for d in range(self.index_rank) if d != self.vector_dim]
        return outer[dims.index(dim)]


def gather(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, indices = operands
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    facts = _Numbers(
        sliced=context.shape(op.operands[0]),
        window_dims=tuple(numbers.offset_dims),
        collapsed=tuple(numbers.collapsed_slice_dims),
        sliced_batching=tuple(numbers.operand_batching_dims),
        index_batching=tuple(numbers.start_indices_batching_dims),
        index_map=tuple(numbers.start_index_map),
        vector_dim=numbers.index_vector_dim,
        window_sizes=integers(op, "slice_sizes"),
        index_rank=len(context.shape(op.operands[1])),
        window_rank=len(context.shape(op.results[0])),
    )
    own = _own_samples(context, op.operands[1], facts)
    if x.is_mixed:
        return x
    if indices.is_mixed and own is None:
        return indices
    is_random = x.random or indices.random
    if not indices.of_samples and own is None:
        if not x.of_samples:
            return replace(_of_step(operands, x), random=is_random)
        dim = facts.window_of(x.dim)
        if dim is None or indices.kind != "same" or not indices.is_plain:
            return mixed(op, "picks some of the samples")
        return replace(x, dim=dim, free=frozenset(), random=is_random, splat=None)
    return _read(op, x, indices, facts, own, is_random)


def _read(
    op: ir.OpView,
    x: Relation,
    indices: Relation,
    facts: _Numbers,
    own: tuple[int, int, int] | None,
    is_random: bool,
) -> Relation:
    """A gather whose indices are samples."""
    if own is not None:
        sliced_dim, index_dim, outer = own
        if x.kind == "rows" and (x.dim, x.outer) == (sliced_dim, outer):
            dim = facts.batch_of(index_dim)
            if dim is not None:
                return replace(x, dim=dim, free=frozenset(), random=is_random, splat=None)
        return mixed(op, "picks rows by the numbers of samples from an array of other rows")
    if indices.kind == "position" or not indices.is_plain:
        return mixed(op, "picks rows by the numbers that samples have in the batch (arange)")
    dim = facts.batch_of(indices.dim)
    if dim is None:
        return mixed(op, "picks rows by all samples together")
    found = Relation(kind="rows", dim=dim, outer=indices.outer, random=is_random)
    if indices.dim in facts.index_batching:
        partner = facts.sliced_batching[facts.index_batching.index(indices.dim)]
        if x.rows_at(partner, indices.outer):
            return found.with_scale(x.scaled)
        return mixed(op, "picks from each row of an array that does not hold the same samples")
    if x.kind == "same":
        return found.with_scale(x.scaled)
    if x.kind == "rows":
        return mixed(op, "picks for each sample rows of other samples")
    return mixed(op, "picks for each sample from what is made of all samples")


def _own_samples(
    context: Context, indices: ir.Value, facts: _Numbers
) -> tuple[int, int, int] | None:
    """The sliced dimension that a column of indices numbers sample by sample, with the dimension
    of the indices that holds the samples and its blocks."""
    columns = _columns(indices, facts.vector_dim)
    if columns is None or len(columns) != len(facts.index_map):
        return None
    samples = [(n, context.at(v)) for n, v in enumerate(columns)]
    counts = [(n, it) for n, it in samples if it.kind == "position" or it.counts]
    rows = [it for _, it in samples if it.kind == "rows"]
    others = [it for n, it in samples if n not in [c for c, _ in counts] and it.kind != "rows"]
    if len(counts) != 1 or any(it.kind != "same" or not it.is_plain for it in others):
        return None
    ((number, count),) = counts
    if any(it.dim != count.dim or it.outer != 1 or not it.is_plain for it in rows):
        return None
    if not rows and count.kind != "position":
        return None
    sliced = facts.index_map[number]
    same_size = facts.sliced[sliced] == context.shape(columns[number])[count.dim]
    return (sliced, count.dim, 1) if same_size and sliced in facts.collapsed else None


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
    along = get_dimension(left.owner.opview, "dimension")
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
    found = Relation(kind="rows", dim=dim, random=any(it.random for _, it in columns))
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


def _columns(indices: ir.Value, vector_dim: int) -> list[ir.Value] | None:
    """What the columns of indices were joined of."""
    owner = indices.owner
    if isinstance(owner, ir.Block):
        return None
    op = owner.opview
    if not isinstance(op, stablehlo.ConcatenateOp) or get_dimension(op, "dimension") != vector_dim:
        shape = ir.RankedTensorType(indices.type).shape
        alone = vector_dim >= len(shape) or shape[vector_dim] == 1
        return [indices] if alone else None
    return list(op.operands)


def _of_step(operands: Operands, x: Relation) -> Relation:
    """What is read of an array without samples, at indices without samples."""
    kinds = {it.kind for it in operands}
    if kinds == {"same"}:
        plain = all(it.is_plain for it in operands[1:])
        return SAME.with_scale(x.scaled) if plain else SIZE
    if x.kind == "sum" and all(it.kind == "same" and it.is_plain for it in operands[1:]):
        return replace(x, free=frozenset(), root=None, splat=None)
    return SIZE if kinds <= {"same", "size"} else STEP


def scatter(context: Context, op: ir.OpView, operands: Operands) -> list[Relation]:
    number = len(op.results)
    if number != 1:
        return [_default_scatter(op, operands)] * number
    x, indices, updates = operands
    attr = op.attributes["scatter_dimension_numbers"]
    numbers = stablehlo.ScatterDimensionNumbers(attr)
    sliced = context.shape(op.operands[0])
    windows = context.shape(op.operands[2])
    window_dims = tuple(numbers.update_window_dims)
    gone = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    kept = [d for d in range(len(sliced)) if d not in gone]
    sizes = [1] * len(sliced)
    for dim, window in zip(kept, window_dims, strict=True):
        sizes[dim] = windows[window]
    facts = _Numbers(
        sliced=sliced,
        window_dims=window_dims,
        collapsed=tuple(numbers.inserted_window_dims),
        sliced_batching=tuple(numbers.input_batching_dims),
        index_batching=tuple(numbers.scatter_indices_batching_dims),
        index_map=tuple(numbers.scattered_dims_to_operand_dims),
        vector_dim=numbers.index_vector_dim,
        window_sizes=tuple(sizes),
        index_rank=len(context.shape(op.operands[1])),
        window_rank=len(windows),
    )
    own = _own_samples(context, op.operands[1], facts)
    worst = next((it for it in (x, updates) if it.is_mixed), None)
    worst = worst or (indices if indices.is_mixed and own is None else None)
    if worst is not None:
        return [worst]
    if indices.of_samples and x.is_zero and combiner(op) == "add":
        updates = _taken_out(context, op, updates)
    found = _written(context, op, x, indices, updates, facts, own)
    is_random = any(it.random for it in operands)
    return [replace(found, free=frozenset(), random=is_random, splat=None, root=None)]


def _taken_out(context: Context, op: ir.OpView, updates: Relation) -> Relation:
    """One in the place of a number of the step that is written for each sample; the scatter, which
    is linear in it, is multiplied by it afterwards."""
    if updates.kind not in ("sum", "step") or updates.root is None:
        return updates
    if not is_float(op.operands[2].type):
        return updates
    context.substituted.add((op.results[0], 2))
    free = frozenset(range(len(context.shape(op.operands[2]))))
    return Relation(kind="same", free=free, splat=1.0, factors=((updates.root, 1),))


def _written(
    context: Context,
    op: ir.OpView,
    x: Relation,
    indices: Relation,
    updates: Relation,
    facts: _Numbers,
    own: tuple[int, int, int] | None,
) -> Relation:
    kind = combiner(op)
    scales = {it.scaled for it in (x, updates) if not it.is_zero}
    linear = kind == "add" or _replaces(op)
    if own is not None:
        dim, index_dim, outer = own
        at = facts.batch_of(index_dim)
        if x.rows_at(dim, outer) and at is not None and updates.rows_at(at, outer):
            return _scaled(op, Relation(kind="rows", dim=dim, outer=outer), scales, linear)
        return mixed(op, "writes rows by the numbers of samples into an array of other rows")
    if not (x.of_samples or indices.of_samples or updates.of_samples):
        return _written_once(op, x, indices, updates, scales, linear)
    if indices.kind == "position":
        return mixed(op, "writes rows by the numbers that samples have in the batch (arange)")
    if indices.kind == "rows" and indices.is_plain:
        at = facts.batch_of(indices.dim)
        if at is None or not updates.rows_at(at, indices.outer):
            return mixed(op, "writes for all samples what is not theirs")
        if indices.dim in facts.index_batching:
            partner = facts.sliced_batching[facts.index_batching.index(indices.dim)]
            if x.rows_at(partner, indices.outer):
                rows = Relation(kind="rows", dim=partner, outer=indices.outer)
                return _scaled(op, rows, scales, linear)
            return mixed(op, "writes into each row of an array that does not hold the same samples")
        power = updates.power + context.power_of_sums(op.results[0])
        if kind == "add" and x.is_zero:
            return Relation(kind="sum", power=power, factors=updates.factors)
        if kind == "add" and x.kind == "sum" and x.scaled == (power, updates.factors):
            return x
        return mixed(op, "writes what several samples may write to one place")
    if indices.kind == "same" and indices.is_plain:
        rows = x if x.kind == "rows" else updates
        dim = rows.dim if rows is x else None
        if dim is None:
            inside = [d for d in facts.kept if facts.window_of(d) == updates.dim]
            dim = inside[0] if inside else None
        at = None if dim is None else facts.window_of(dim)
        if at is None or dim is None:
            return mixed(op, "writes to some of the samples")
        if x.rows_at(dim, rows.outer) and updates.rows_at(at, rows.outer):
            return _scaled(op, Relation(kind="rows", dim=dim, outer=rows.outer), scales, linear)
    return mixed(op, "writes to some of the samples")


def _scaled(
    op: ir.OpView, rows: Relation, scales: set[tuple[int, Factors]], linear: bool
) -> Relation:
    if len(scales) > 1 or (not linear and scales - {(0, ())}):
        return mixed(op, "joins numbers that depend on the size of the batch in different ways")
    return rows.with_scale(scales.pop() if scales else (0, ()))


def _written_once(
    op: ir.OpView,
    x: Relation,
    indices: Relation,
    updates: Relation,
    scales: set[tuple[int, Factors]],
    linear: bool,
) -> Relation:
    """Of arrays without samples."""
    kinds = {it.kind for it in (x, indices, updates)}
    if "position" in kinds:
        return mixed(op, "computes with the numbers that samples have in the batch (arange)")
    fixed = indices.kind == "same" and indices.is_plain
    if kinds == {"same"} and fixed and len(scales) <= 1 and (linear or scales <= {(0, ())}):
        return SAME.with_scale(scales.pop() if scales else (0, ()))
    sums = [it for it in (x, updates) if it.kind == "sum"]
    others = [it for it in (x, updates) if it.kind != "sum"]
    if fixed and linear and sums and len(scales) == 1 and all(it.is_zero for it in others):
        return sums[0].with_scale(scales.pop())
    return SIZE if kinds <= {"same", "size"} else STEP


def _replaces(op: ir.OpView) -> bool:
    """Whether a scatter writes its updates as they are."""
    block = op.regions[0].blocks[0]
    inner = list(block.operations)
    return len(inner) == 1 and inner[0].operands[0] == block.arguments[1]


def _default_scatter(op: ir.OpView, operands: Operands) -> Relation:
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    if all(it.kind == "same" and it.is_plain for it in operands):
        return SAME
    if all(it.of_step for it in operands):
        return STEP
    return mixed(op, "writes several arrays at once")


def dynamic_slice(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, *starts = operands
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    is_random = any(it.random for it in operands)
    sizes, shape = integers(op, "slice_sizes"), context.shape(op.operands[0])
    free = frozenset(d for d in x.free if d < len(shape))
    if not x.of_samples:
        return replace(_of_step(operands, x), free=free, random=is_random)
    fixed = all(it.kind == "same" and it.is_plain for it in starts)
    if not fixed or not _whole_dimension(context, sizes, shape, starts, x.dim):
        return mixed(op, "picks some of the samples")
    return replace(x, free=free, random=is_random, root=None)


def _whole_dimension(
    context: Context, sizes: Shape, shape: Shape, starts: Operands, dim: int
) -> bool:
    """Whether a slice holds all samples, and not by its index one sample of a batch of one."""
    alone = shape[dim] == 1 and not context.whole_is_known
    return sizes[dim] == shape[dim] and (not alone or starts[dim].is_zero)


def dynamic_update_slice(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, update, *starts = operands
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    found = _updated(context, op, x, update, starts)
    is_random = any(it.random for it in operands)
    shapes = [context.shape(value) for value in op.operands[:2]]
    if found.kind == "same" and x.is_zero and update.is_zero:
        return replace(found, free=frozenset(range(len(shapes[0]))), random=is_random, splat=0)
    spanned = {d for d, (a, b) in enumerate(zip(*shapes, strict=True)) if a == b}
    free = x.free & update.free & spanned
    return replace(found, free=free, random=is_random, splat=None, root=None)


def _updated(
    context: Context, op: ir.OpView, x: Relation, update: Relation, starts: Operands
) -> Relation:
    scales = {it.scaled for it in (x, update) if not it.is_zero}
    fixed = all(it.kind == "same" and it.is_plain for it in starts)
    if not (x.of_samples or update.of_samples):
        kinds = {x.kind, update.kind, *(it.kind for it in starts)}
        if not fixed or len(scales) > 1:
            return SIZE if kinds <= {"same", "size"} else STEP
        scale = scales.pop() if scales else (0, ())
        if kinds == {"same"}:
            return SAME.with_scale(scale)
        pair = (x, update)
        if all(it.kind == "sum" or it.is_zero for it in pair):
            return Relation(kind="sum").with_scale(scale)
        return STEP
    rows = rows_among((x, update))
    if rows is None or not fixed:
        return mixed(op, "writes to some of the samples")
    dim, outer = rows.dim, rows.outer
    sizes, shape = context.shape(op.operands[1]), context.shape(op.operands[0])
    fits = _whole_dimension(context, sizes, shape, starts, dim)
    if not fits or not all(it.rows_at(dim, outer) for it in (x, update)):
        return mixed(op, "writes to some of the samples")
    if len(scales) > 1:
        return mixed(op, "joins numbers that depend on the size of the batch in different ways")
    return Relation(kind="rows", dim=dim, outer=outer).with_scale(
        scales.pop() if scales else (0, ())
    )


def sort(context: Context, op: ir.OpView, operands: Operands) -> list[Relation]:
    return along(context, op, operands, get_dimension(op, "dimension"), "sorts the samples")


def top_k(context: Context, op: ir.OpView, operands: Operands) -> list[Relation]:
    last = len(context.shape(op.operands[0])) - 1
    return along(context, op, operands, last, "takes the largest of the samples")


def along(
    context: Context, op: ir.OpView, operands: Operands, dim: int, text: str
) -> list[Relation]:
    """Of an op that computes along one dimension, and apart along the others."""
    number = len(op.results)
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return [worst] * number
    is_random = any(it.random for it in operands)
    rows = rows_among(operands)
    if rows is None:
        if any(it.kind == "position" for it in operands):
            return [mixed(op, "computes with the numbers that samples have in the batch")] * number
        kinds = {it.kind for it in operands}
        plain = all(it.is_plain for it in operands)
        found = SAME if kinds == {"same"} and plain else SIZE if kinds <= {"same", "size"} else STEP
        return [replace(found, random=is_random)] * number
    dim = dim % len(context.shape(op.operands[0]))
    if rows.dim == dim:
        return [mixed(op, text)] * number
    if not all(it.rows_at(rows.dim, rows.outer) for it in operands):
        return [mixed(op, "computes the samples with an array that does not hold them")] * number
    if not all(it.is_plain for it in operands):
        return [
            mixed(op, "is not linear in a number that depends on the size of the batch")
        ] * number
    return [replace(rows, free=frozenset(), random=is_random, splat=None)] * number
