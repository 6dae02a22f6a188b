"""Rules of ops that sum over dimensions: what is summed over samples is a sum, or is mixed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from alpa.dialects import body, ir, stablehlo
from alpa.passes.analysis.micro_batches.context import Context, is_bool
from alpa.passes.analysis.micro_batches.relation import (
    SAME,
    SIZE,
    STEP,
    Relation,
    mixed,
    rows_among,
)
from alpa.passes.analysis.micro_batches.shapes import by_size, get_dimension, integers

Operands = Sequence[Relation]


def combiner(op: ir.OpView, region: int = 0) -> str:
    """What a region of two scalars computes: the name of its only op, or nothing."""
    inner = list(body(op, region).operations)
    if len(inner) != 2 or set(inner[0].operands) != set(body(op, region).arguments):
        return ""
    return inner[0].operation.name.removeprefix("stablehlo.")


def reduce(context: Context, op: ir.OpView, operands: Operands) -> list[Relation]:
    dims = integers(op, "dimensions")
    half = len(operands) // 2
    inputs, starts = operands[:half], operands[half:]
    kind = combiner(op)
    number = len(op.results)
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return [worst] * number
    shape = context.shape(op.operands[0])
    kept = [d for d in range(len(shape)) if d not in dims]
    free = inputs[0].free.intersection(*(it.free for it in inputs))
    free = frozenset(kept.index(d) for d in free if d in kept)
    is_random = any(it.random for it in operands)
    found = _reduced(context, op, inputs, starts, dims, kind, kept)
    splat = 0 if kind == "add" and all(it.is_zero for it in operands) else None
    return [replace(found, free=free, random=is_random, splat=splat)] * number


def _reduced(
    context: Context,
    op: ir.OpView,
    inputs: Operands,
    starts: Operands,
    dims: Sequence[int],
    kind: str,
    kept: Sequence[int],
) -> Relation:
    if any(it.kind == "position" for it in inputs):
        return mixed(op, "computes with the numbers that samples have in the batch (arange)")
    rows = rows_among(inputs)
    if rows is None:
        if any(_repeats(context, it, op.operands[0], dims) for it in inputs):
            return mixed(op, _REPEATED)
        return _of_step(inputs, starts, kind)
    if not all(it.rows_at(rows.dim, rows.outer) for it in inputs):
        return mixed(op, "reduces the samples together with an array that does not hold them")
    plain = all(it.kind == "same" and it.is_plain for it in starts)
    if rows.dim in dims:
        is_sum = kind == "add" and not is_bool(op.results[0].type)
        if is_sum and all(it.is_zero for it in starts):
            power = rows.power + context.power_of_sums(op.results[0])
            return Relation(kind="sum", power=power, factors=rows.factors)
        return mixed(op, _NO_SUMS.get(kind, "reduces the samples, not by a sum"))
    linear = kind == "add" and all(it.is_zero for it in starts)
    if not linear and not (plain and all(it.is_plain for it in inputs)):
        return mixed(op, "is not linear in a number that depends on the size of the batch")
    return replace(rows, dim=kept.index(rows.dim), splat=None)


_NO_SUMS = {
    "maximum": "takes the maximum over the samples",
    "minimum": "takes the minimum over the samples",
    "and": "tells whether all samples are true",
    "or": "tells whether any sample is true",
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


def _of_step(inputs: Operands, starts: Operands, kind: str) -> Relation:
    """Of arrays without samples."""
    kinds = {it.kind for it in (*inputs, *starts)}
    linear = kind == "add" and all(it.is_zero for it in starts)
    if kinds == {"same"}:
        if linear or all(it.is_plain for it in (*inputs, *starts)):
            return SAME.with_scale(inputs[0].scaled) if linear else SAME
        return SIZE
    if linear and len(inputs) == 1 and inputs[0].kind == "sum":
        return replace(inputs[0], root=None)
    return SIZE if kinds <= {"same", "size"} else STEP


def dot_general(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batching = (
        list(numbers.lhs_batching_dimensions),
        list(numbers.rhs_batching_dimensions),
    )
    contracting = (
        list(numbers.lhs_contracting_dimensions),
        list(numbers.rhs_contracting_dimensions),
    )
    return _product(context, op, operands, batching, contracting)


def dot(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    rank = len(context.shape(op.operands[0]))
    return _product(context, op, operands, ([], []), ([rank - 1], [0]))


def _product(
    context: Context,
    op: ir.OpView,
    operands: Operands,
    batching: tuple[list[int], list[int]],
    contracting: tuple[list[int], list[int]],
) -> Relation:
    operands = _taken_out(context, op, operands)
    ranks = [len(context.shape(value)) for value in op.operands]
    place: list[dict[int, int]] = []
    first = len(batching[0])
    for side in (0, 1):
        at = {d: n for n, d in enumerate(batching[side])}
        rest = [d for d in range(ranks[side]) if d not in batching[side] + contracting[side]]
        at |= {d: first + n for n, d in enumerate(rest)}
        first += len(rest)
        place.append(at)
    for n, it in enumerate(operands):
        if _repeats(context, it, op.operands[n], contracting[n]):
            return mixed(op, _REPEATED)
    free = frozenset(place[n][d] for n, it in enumerate(operands) for d in it.free if d in place[n])
    free -= frozenset(range(len(batching[0])))
    if (common := multiplied(op, operands)) is not None:
        if common.kind != "same":
            return common
        splat = 0 if any(it.is_zero for it in operands) else None
        return replace(common, free=free, splat=splat)
    side = 0 if rows_among(operands) is operands[0] else 1
    rows, other = operands[side], operands[1 - side]
    scale = operands[0].times(operands[1])
    is_random = any(it.random for it in operands)
    for mine, theirs in ((batching, batching), (contracting, contracting)):
        if rows.dim not in mine[side]:
            continue
        partner = theirs[1 - side][mine[side].index(rows.dim)]
        if not other.rows_at(partner, rows.outer):
            return mixed(op, "multiplies the samples by an array that does not hold the same ones")
        if mine is batching:
            found = replace(rows, dim=place[side][rows.dim], free=free, splat=None)
            return replace(found.with_scale(scale), random=is_random)
        power = scale[0] + context.power_of_sums(op.results[0])
        return Relation(kind="sum", power=power, factors=scale[1], free=free, random=is_random)
    if other.kind != "same":
        return mixed(op, "multiplies each sample by all samples")
    found = replace(rows, dim=place[side][rows.dim], free=free, splat=None)
    return replace(found.with_scale(scale), random=is_random)


def _taken_out(context: Context, op: ir.OpView, operands: Operands) -> Operands:
    """A product's operands, with ones for numbers of the step by which samples are multiplied."""
    if not any(it.kind == "rows" for it in operands):
        return operands
    return [context.taken_out(op, n, it) for n, it in enumerate(operands)]


def multiplied(op: ir.OpView, operands: Operands) -> Relation | None:
    """Of a product of two arrays without samples, or of which one is mixed; None for others."""
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    if any(it.kind == "position" for it in operands):
        return mixed(op, "computes with the numbers that samples have in the batch (arange)")
    kinds = {it.kind for it in operands}
    is_random = any(it.random for it in operands)
    if "rows" in kinds:
        if kinds & {"sum", "step", "size"}:
            return mixed(
                op, "multiplies samples by what is made of all samples, or of their number"
            )
        return None
    if kinds == {"same"}:
        return replace(SAME.with_scale(operands[0].times(operands[1])), random=is_random)
    sums = [it for it in operands if it.kind == "sum"]
    if len(sums) == 1 and "same" in kinds:
        found = Relation(kind="sum").with_scale(operands[0].times(operands[1]))
        return replace(found, random=is_random)
    return replace(SIZE if kinds <= {"same", "size"} else STEP, random=is_random)


def convolution(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    """Samples in the input's batch dimension, or in the features of both, which are summed over:
    so jax computes the gradient of a kernel."""
    operands = _taken_out(context, op, operands)
    if (common := multiplied(op, operands)) is not None:
        return common
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    x, kernel = operands
    scale = x.times(kernel)
    is_random = x.random or kernel.random
    groups = {
        name: get_dimension(op, name) for name in ("feature_group_count", "batch_group_count")
    }
    in_batch = x.kind == "rows" and x.dim == numbers.input_batch_dimension
    if in_batch and kernel.kind == "same" and groups["batch_group_count"] == 1:
        found = Relation(
            kind="rows", dim=numbers.output_batch_dimension, outer=x.outer, random=is_random
        )
        return found.with_scale(scale)
    rows = rows_among(operands)
    assert rows is not None
    if (
        x.rows_at(numbers.input_feature_dimension, rows.outer)
        and kernel.rows_at(numbers.kernel_input_feature_dimension, rows.outer)
        and groups["feature_group_count"] == 1
    ):
        power = scale[0] + context.power_of_sums(op.results[0])
        return Relation(kind="sum", power=power, factors=scale[1], random=is_random)
    return mixed(op, "convolves over the samples")


def windowed(context: Context, op: ir.OpView, operands: Operands) -> list[Relation]:
    """`reduce_window`: samples pass where the window is one sample wide."""
    half = len(operands) // 2
    inputs, starts = operands[:half], operands[half:]
    worst = next((it for it in operands if it.is_mixed), None)
    number = len(op.results)
    if worst is not None:
        return [worst] * number
    is_random = any(it.random for it in operands)
    linear = combiner(op) == "add" and all(it.is_zero for it in starts)
    plain = all(it.is_plain for it in operands)
    rows = rows_among(inputs)
    if rows is None:
        found = _of_step(inputs, starts, combiner(op))
        if any(it.kind == "position" for it in inputs):
            found = mixed(op, "computes with the numbers that samples have in the batch (arange)")
        elif context.whole(op).keys() - {"types"}:
            found = by_size(op, found, "")
        return [replace(found, free=frozenset(), random=is_random, splat=None)] * number
    if not one_wide(context, op, rows.dim) or not all(
        it.rows_at(rows.dim, rows.outer) for it in inputs
    ):
        return [mixed(op, "reduces over neighbouring samples")] * number
    if not (linear or plain):
        return [
            mixed(op, "is not linear in a number that depends on the size of the batch")
        ] * number
    return [replace(rows, free=frozenset(), random=is_random, splat=None)] * number


def one_wide(context: Context, op: ir.OpView, dim: int) -> bool:
    """Whether a window takes the elements along a dimension one by one, for any size of batch."""
    if context.whole(op).keys() - {"types"}:
        return False
    expected = {
        "window_dimensions": 1,
        "window_strides": 1,
        "base_dilations": 1,
        "window_dilations": 1,
    }
    for name, number in expected.items():
        if name in op.attributes and integers(op, name)[dim] != number:
            return False
    if "padding" not in op.attributes:
        return True
    padding = ir.DenseIntElementsAttr(op.attributes["padding"])
    return padding[2 * dim] == padding[2 * dim + 1] == 0


def select_and_scatter(context: Context, op: ir.OpView, operands: Operands) -> Relation:
    x, source, start = operands
    worst = next((it for it in operands if it.is_mixed), None)
    if worst is not None:
        return worst
    is_random = any(it.random for it in operands)
    if all(it.kind == "same" and it.is_plain for it in operands):
        return replace(SAME, random=is_random)
    rows = x if x.kind == "rows" else source
    fits = (
        x.rows_at(rows.dim, rows.outer)
        and source.rows_at(rows.dim, rows.outer)
        and one_wide(context, op, rows.dim)
    )
    is_sum = start.is_zero and combiner(op, 1) == "add"
    if rows.kind == "rows" and fits and x.is_plain and is_sum:
        found = Relation(kind="rows", dim=rows.dim, outer=rows.outer, random=is_random)
        return found.with_scale(source.scaled)
    if all(it.of_step for it in operands):
        return replace(STEP, random=is_random)
    return mixed(op, "reduces over neighbouring samples")
