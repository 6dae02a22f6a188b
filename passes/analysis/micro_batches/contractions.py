"""Rules of ops that sum over dimensions: what is summed over samples is a sum, or is mixed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import combiner
from alpa.passes.analysis.micro_batches.context import Context, is_bool
from alpa.passes.analysis.micro_batches.relation import (
    SAME,
    Relation,
    as_rows,
    mixed,
    once,
    rows_among,
    uneven,
    without_samples,
)
from alpa.passes.analysis.micro_batches.shapes import by_size, integer, integers

Operands = Sequence[Relation]


def _is_linear(op: ir.OpView, starts: Operands) -> bool:
    """Whether a reduction adds up its inputs."""
    return combiner(op) == "stablehlo.add" and all(it.is_zero for it in starts)


def _apart(op: ir.OpView, inputs: Operands, starts: Operands, rows: Relation | None) -> Relation:
    """Of a reduction of no samples, or of each for itself, where `rows` are those of the result."""
    linear = _is_linear(op, starts)
    if rows is None:
        return without_samples(inputs, () if linear else starts, linear=linear)
    if not (linear or all(it.is_fixed for it in starts)):
        return uneven(op, [*inputs, *starts])
    return as_rows(op, rows, inputs, linear=linear)


def reduce(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    dims = integers(op, "dimensions")
    kept = [d for d in range(len(context.shape(op.operands[0]))) if d not in dims]
    inputs, starts = operands[: len(op.results)], operands[len(op.results) :]
    free = frozenset.intersection(*(it.free for it in inputs))
    free = frozenset(kept.index(d) for d in free if d in kept)
    splat = 0 if _is_linear(op, starts) and all(it.is_zero for it in inputs) else None
    return replace(_reduced(context, op, inputs, starts, kept), free=free, splat=splat)


def _reduced(
    context: Context, op: ir.OpView, inputs: Operands, starts: Operands, kept: Sequence[int]
) -> Relation:
    rows = rows_among(inputs)
    if rows is None:
        if any(_repeats(context, it, op.operands[0], integers(op, "dimensions")) for it in inputs):
            return mixed(op, _REPEATED)
        return _apart(op, inputs, starts, None)
    if not rows.are_in(inputs):
        return mixed(op, "reduces the samples together with an array that does not hold them")
    if rows.dim in kept:
        return _apart(op, inputs, starts, replace(rows, dim=kept.index(rows.dim)))
    if _is_linear(op, starts) and not is_bool(op.results[0].type):
        return context.sum_of(op, rows.scaled)
    return mixed(op, _NO_SUMS.get(combiner(op) or "", "reduces the samples, not by a sum"))


_NO_SUMS = {
    "stablehlo.maximum": "takes the maximum over the samples",
    "stablehlo.minimum": "takes the minimum over the samples",
    "stablehlo.and": "tells whether all samples are true",
    "stablehlo.or": "tells whether any sample is true",
}
_REPEATED = (
    "adds up a function of all samples along a dimension that may be as long as the batch, which "
    "only the program for the whole batch tells"
)


def _repeats(context: Context, x: Relation, value: ir.Value, dims: Iterable[int]) -> bool:
    """Whether an array repeats a number of the step, perhaps once for each sample."""
    shape = context.shape(value)
    if x.kind not in ("sum", "step"):
        return False
    return any(d in x.free and context.may_count_samples(shape[d]) for d in dims)


_Pairs = list[tuple[int, int]]


def product_dims(op: ir.OpView) -> tuple[_Pairs, _Pairs, list[dict[int, int]]]:
    """The dimensions of a product's operands: pairs that are a batch, pairs that are summed over,
    and for each operand where those that are not summed over are in the result."""
    ranks = [ir.RankedTensorType(value.type).rank for value in op.operands]
    if op.operation.name == "stablehlo.dot":
        batching, contracting = [], [(ranks[0] - 1, 0)]
    else:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        left, right = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
        batching = list(zip(left, right, strict=True))
        left, right = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
        contracting = list(zip(left, right, strict=True))
    places: list[dict[int, int]] = []
    free = count(len(batching))
    for side, rank in enumerate(ranks):
        shared = {pair[side]: n for n, pair in enumerate(batching)}
        gone = {*shared, *(pair[side] for pair in contracting)}
        places.append(shared | {d: next(free) for d in range(rank) if d not in gone})
    return batching, contracting, places


def product(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """A `dot` or a `dot_general`."""
    operands = _taken_out(context, op, operands)
    batching, contracting, places = product_dims(op)
    for n, it in enumerate(operands):
        if _repeats(context, it, op.operands[n], [pair[n] for pair in contracting]):
            return mixed(op, _REPEATED)
    pairs = zip(operands, places, strict=True)
    free = frozenset(place[d] for it, place in pairs for d in it.free if d in place)
    free -= frozenset(range(len(batching)))
    if (common := multiplied(op, operands)) is not None:
        if common.kind != "same":
            return common
        splat = 0 if any(it.is_zero for it in operands) else None
        return replace(common, free=free, splat=splat)
    side = 0 if rows_among(operands) is operands[0] else 1
    rows, other = operands[side], operands[1 - side]
    scale = operands[0].times(operands[1])
    partner = {pair[side]: pair[1 - side] for pair in (*batching, *contracting)}
    if rows.dim in partner:
        if not other.rows_at(partner[rows.dim], rows.outer):
            return mixed(op, "multiplies the samples by an array that does not hold the same ones")
    elif other.kind != "same":
        return mixed(op, "multiplies each sample by all samples")
    place = places[side].get(rows.dim)
    if place is None:
        return replace(context.sum_of(op, scale), free=free)
    return replace(rows, dim=place, free=free, splat=None).with_scale(scale)


def _taken_out(context: Context, op: ir.OpView, operands: Operands) -> Operands:
    """A product's operands, with ones for numbers of the step by which samples are multiplied."""
    if not any(it.kind == "rows" for it in operands):
        return operands
    return [context.taken_out(op, n, it) for n, it in enumerate(operands)]


def multiplied(op: ir.OpView, operands: Operands) -> Relation | None:
    """Of a product of two arrays without samples; None for others."""
    kinds = {it.kind for it in operands}
    if "rows" in kinds:
        if kinds <= {"rows", "same"}:
            return None
        return mixed(op, "multiplies samples by what is made of all samples, or of their number")
    scale = operands[0].times(operands[1])
    if kinds == {"same"}:
        return SAME.with_scale(scale)
    return Relation(kind="sum").with_scale(scale) if kinds == {"sum", "same"} else once(operands)


def convolution(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """Samples are in the input's batch dimension, or in the features of both operands, which are
    summed over: JAX computes the gradient of a kernel like this."""
    operands = _taken_out(context, op, operands)
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    summed = (
        (numbers.input_feature_dimension, *numbers.input_spatial_dimensions),
        (numbers.kernel_input_feature_dimension, *numbers.kernel_spatial_dimensions),
    )
    for it, value, dims in zip(operands, op.operands, summed, strict=True):
        if _repeats(context, it, value, dims):
            return mixed(op, _REPEATED)
    if (common := multiplied(op, operands)) is not None:
        return common
    x, kernel = operands
    scale = x.times(kernel)
    in_batch = x.kind == "rows" and x.dim == numbers.input_batch_dimension
    if in_batch and kernel.kind == "same" and integer(op, "batch_group_count") == 1:
        dim = numbers.output_batch_dimension
        return Relation(kind="rows", dim=dim, outer=x.outer).with_scale(scale)
    rows = rows_among(operands)
    assert rows is not None
    if (
        x.rows_at(numbers.input_feature_dimension, rows.outer)
        and kernel.rows_at(numbers.kernel_input_feature_dimension, rows.outer)
        and integer(op, "feature_group_count") == 1
    ):
        return context.sum_of(op, scale)
    return mixed(op, "convolves over the samples")


def windowed(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """`reduce_window`: samples pass where the window is one sample wide."""
    inputs, starts = operands[: len(op.results)], operands[len(op.results) :]
    rows = rows_among(inputs)
    if rows is None:
        wide = [d for d, size in enumerate(integers(op, "window_dimensions")) if size != 1]
        if any(_repeats(context, it, op.operands[0], wide) for it in inputs):
            return mixed(op, _REPEATED)
        found = _apart(op, inputs, starts, None)
        return by_size(op, found, "") if context.whole(op).keys() - {"types"} else found
    if one_wide(context, op, rows.dim) and rows.are_in(inputs):
        return _apart(op, inputs, starts, rows)
    return mixed(op, "reduces over neighbouring samples")


def one_wide(context: Context, op: ir.OpView, dim: int) -> bool:
    """Whether a window takes the elements along a dimension one by one, for any size of batch."""
    if context.whole(op).keys() - {"types"}:
        return False
    names = ("window_dimensions", "window_strides", "base_dilations", "window_dilations")
    if any(name in op.attributes and integers(op, name)[dim] != 1 for name in names):
        return False
    if "padding" not in op.attributes:
        return True
    padding = ir.DenseIntElementsAttr(op.attributes["padding"])
    return padding[2 * dim] == padding[2 * dim + 1] == 0


def select_and_scatter(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, source, start = operands
    if all(it.of_step for it in operands):
        return without_samples(operands)
    rows = x if x.kind == "rows" else source
    is_sum = start.is_zero and combiner(op, 1) == "stablehlo.add" and x.is_plain
    if (
        is_sum
        and rows.kind == "rows"
        and rows.are_in((x, source))
        and one_wide(context, op, rows.dim)
    ):
        return as_rows(op, rows, [source], linear=True)
    return mixed(op, "reduces over neighbouring samples")
