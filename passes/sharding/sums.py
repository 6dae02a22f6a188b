"""Variants of an op's partial sums: reduced on all devices, scattered, or kept.

If mesh axes shard a reduction factor, each device has a partial sum. Along each of these axes the
result becomes

* a replica, by an all-reduce;
* or a shard of one of its dimensions, by a reduce-scatter, which is half of an all-reduce. The
  other half, an all-gather, may never be needed: the search finds ZeRO and weight-update sharding.

Or, over all of these axes, the result stays *unreduced*: the partial sums of the micro-batches'
gradients are added up and reduced once per step.

An unreduced layout has one more entry than the tensor has dimensions: the axes of the partial sums.
In memory this is an extra dimension, sharded over those axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np

from alpa.dialects import ir, stablehlo
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.analysis.block_rows import Row, rows_of
from alpa.passes.analysis.graph import combiner, read_inside
from alpa.passes.cost.collectives import LogicalMesh, all_reduce, reduce_scatter
from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.sharding.strategies import Strategy, local_elements


def unreduced_axes(layout: Layout, rank: int) -> tuple[int, ...]:
    """The axes over which a tensor of this rank is a partial sum; none for an ordinary layout."""
    return layout[rank] if len(layout) > rank else ()


def stored(
    shape: Sequence[int], sharding: Sharding, mesh: Mesh
) -> tuple[tuple[int, ...], Sharding]:
    """Shape and sharding of a value in memory: a partial sum has a leading dimension of parts."""
    if not sharding.unreduced:
        return tuple(shape), sharding
    parts = prod(dict(mesh.axes)[axis.name] for axis in sharding.unreduced)
    dims = (sharding.unreduced, *sharding.dims)
    return (parts, *shape), Sharding(sharding.mesh, dims)


# Variants of a strategy


def scatters(
    strategy: Strategy, shape: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[Strategy]:
    """The variants that scatter the sum over some of its axes, which must divide it evenly."""
    (layout,) = strategy.results
    for dims in product((None, *range(len(shape))), repeat=len(strategy.reduced)):
        pairs = zip(strategy.reduced, dims, strict=True)
        scattered = tuple((axis, dim) for axis, dim in pairs if dim is not None)
        grown = list(layout)
        for axis, dim in scattered:
            grown[dim] = (*grown[dim], axis)
        ascending = all(list(axes) == sorted(axes) for axes in grown)
        divides = all(
            size > 0 and size % prod(sizes[a] for a in axes) == 0
            for size, axes in zip(shape, grown, strict=True)
            if axes
        )
        if scattered and ascending and divides:
            yield replace(strategy, results=(tuple(grown),), scattered=scattered)


def unreduced(strategy: Strategy, axes: tuple[int, ...], operands: Sequence[int] = ()) -> Strategy:
    """The variant whose result stays partial sums over these axes, as these operands are."""
    if not axes:
        return strategy
    return replace(
        strategy,
        operands=tuple(
            (*layout, axes) if i in operands else layout
            for i, layout in enumerate(strategy.operands)
        ),
        results=tuple((*layout, axes) for layout in strategy.results),
        unreduced=True,
    )


def seconds_at_once(mesh: LogicalMesh, strategy: Strategy, partial_bytes: Sequence[float]) -> float:
    """Seconds of the collectives of an op that reduces its results, of `partial_bytes`, itself.

    On GPUs, XLA makes a reduce-scatter only of a sum whose axes all cut one dimension. Of any other
    it makes an all-reduce of the whole sum, and a slice.
    """
    cut = {dim for _, dim in strategy.scattered}
    if len(cut) > 1 or len(strategy.scattered) < len(strategy.reduced):
        strategy = replace(strategy, scattered=())
    return sum_seconds(mesh, strategy, partial_bytes)


def sum_seconds(mesh: LogicalMesh, strategy: Strategy, partial_bytes: Sequence[float]) -> float:
    """Seconds of the collectives that reduce partial sums of `partial_bytes` on a device.

    Those that are reduced later get a reduce-scatter for each dimension (`lower-partial-sums`).
    """
    if strategy.unreduced:
        return 0.0
    cut = dict.fromkeys(dim for _, dim in strategy.scattered)
    groups = [tuple(axis for axis, on in strategy.scattered if on == dim) for dim in cut]
    rest = tuple(axis for axis in strategy.reduced if axis not in dict(strategy.scattered))
    seconds = 0.0
    for size in partial_bytes:
        left = size
        for axes in groups:
            seconds += reduce_scatter(mesh, axes, left)
            left /= prod(mesh.sizes[axis] for axis in axes)
        if rest:
            seconds += all_reduce(mesh, rest, left)
    return seconds


# Costs of reducing later


def matrix_with_sums(
    table: ReshardTable,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    itemsize: int,
) -> np.ndarray:
    """`ReshardTable.matrix` for layouts that may be unreduced; inf from a sum to partial sums.

    Partial sums take the cheapest of an all-reduce and reduce-scatters, and a change of layout.
    """
    rank, sizes = len(shape), table.mesh.sizes
    plain = [layout[:rank] for layout in targets]
    matrix = table.matrix([layout[:rank] for layout in sources], plain, shape, itemsize)
    for i, source in enumerate(sources):
        axes = unreduced_axes(source, rank)
        if axes:
            reduced = Strategy((), (source[:rank],), axes, 1)
            local = itemsize * local_elements(shape, sizes, source[:rank])
            ways = [reduced, *scatters(reduced, shape, sizes)]
            first = np.array([sum_seconds(table.mesh, way, [local]) for way in ways])
            then = table.matrix([way.results[0] for way in ways], plain, shape, itemsize)
            matrix[i] = np.min(first[:, None] + then, axis=0)
    for j, target in enumerate(targets):
        if unreduced_axes(target, rank):
            matrix[:, j] = [0.0 if source == target else inf for source in sources]
    return matrix


# Which ops may keep them

_LINEAR = (stablehlo.NegOp, stablehlo.ReshapeOp, stablehlo.TransposeOp)


def deferrable(
    block: ir.Block, results: Sequence[int], rows: Sequence[Row] | None = None
) -> set[ir.Value]:
    """The values of a fragment that may stay unreduced.

    They flow only through linear ops, and only into `results`: the numbers of the fragment's
    results that are added up over the micro-batches. `rows` are those of the block, if they have
    been read.
    """
    found, passed, reduced = set[ir.Value](), set[ir.Value](), set[ir.Value]()
    *rows, end = rows_of(block) if rows is None else rows
    wanted = set(results)
    for number, value in enumerate(end.operands):
        (passed if number in wanted else reduced).add(value)
    for op, _, operands, made in reversed(rows):
        stay = [value for value in made if value in passed and value not in reduced]
        found.update(stay)
        linear = linear_operands(op) if made and made[0] in found else ()
        if linear:
            passed.update([operands[i] for i in linear])
            reduced.update([value for i, value in enumerate(operands) if i not in linear])
        else:
            reduced.update(operands)
        if len(op.regions):
            reduced.update(read_inside(op))
    return found


def linear_operands(op: ir.OpView) -> tuple[int, ...]:
    """The operands in which an op is linear: partial sums of them give partial sums."""
    if isinstance(op, stablehlo.ConvertOp):
        floats = all("f" in str(v.type.element_type) for v in (*op.operands, *op.results))
        return (0,) if floats else ()
    if isinstance(op, stablehlo.MulOp):
        return tuple(i for i in range(2) if _constant(op.operands[1 - i]))
    if isinstance(op, stablehlo.DivOp):
        return (0,) if _constant(op.operands[1]) else ()
    if isinstance(op, stablehlo.AddOp | stablehlo.SubtractOp):
        return () if any(map(_constant, op.operands)) else (0, 1)
    if isinstance(op, stablehlo.ReduceOp):
        return (0,) if starts_sums(op) else ()
    return (0,) if isinstance(op, _LINEAR) else ()


def starts_sums(op: ir.OpView) -> bool:
    """Whether an op sums from zero, so that each device can sum its share alone."""
    if isinstance(op, stablehlo.ReduceOp):
        return len(op.results) == 1 and combiner(op) == "stablehlo.add" and _is_zero(op.operands[1])
    if isinstance(op, stablehlo.ScatterOp):
        return len(op.results) == 1 and combiner(op) == "stablehlo.add" and _is_zero(op.operands[0])
    if isinstance(op, stablehlo.ConvolutionOp):
        groups = (op.feature_group_count, op.batch_group_count)
        return all(ir.IntegerAttr(group).value == 1 for group in groups)
    return isinstance(op, stablehlo.DotGeneralOp)


def may_stay_unreduced(op: ir.OpView, strategy: Strategy) -> bool:
    """Whether an op that `starts_sums` can keep the partial sums of this strategy."""
    reduced = set(strategy.reduced)
    dims = [set(axes) for layout in (*strategy.operands, *strategy.results) for axes in layout]
    if not reduced or any(axes & reduced and axes - reduced for axes in dims):
        return False
    if not isinstance(op, stablehlo.ConvolutionOp):
        return True
    # A kernel's gradient: its "features" are the batch, split alike in image and kernel.
    numbers = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    image, kernel = strategy.operands
    return (
        image[numbers.input_feature_dimension] == strategy.reduced
        and kernel[numbers.kernel_input_feature_dimension] == strategy.reduced
    )


def _is_zero(value: ir.Value) -> bool:
    constant = _constant(value)
    if constant is None:
        return False
    if isinstance(ir.RankedTensorType(constant.results[0].type).element_type, ir.ComplexType):
        # The bindings of jaxlib 0.10.2 have no class for its value.
        return "dense<(0.000000e+00,0.000000e+00)>" in str(constant)
    dense = ir.DenseElementsAttr(constant.attributes["value"])
    number = dense.get_splat_value() if dense.is_splat else None
    return isinstance(number, ir.FloatAttr) and number.value == 0.0


def _constant(value: ir.Value) -> stablehlo.ConstantOp | None:
    """The constant op behind a value or its broadcast, if any."""
    op = value.owner
    if isinstance(op, stablehlo.BroadcastInDimOp):
        op = op.operands[0].owner
    return op if isinstance(op, stablehlo.ConstantOp) else None
