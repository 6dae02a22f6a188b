"""Which dimensions of a program's arguments are one: the evidence for what holds samples.

Two dimensions are one where an op needs them to be equal: those of the operands of an addition,
those that a product sums over, those of a batch of indices and of what is read. Dimensions that
only happen to be of one size are not: class weights that are looked up by labels share no dimension
with the batch, though there may be as many classes as samples.

Two dimensions are one, too, where they have the same number of elements and equal parts of them
are one (`x.reshape(2, -1, 6)` beside `y.reshape(2, -1)`), and where a loop goes through both by one
counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.micro_batches.shapes import get_dimension, integers
from alpa.passes.analysis.op_kinds import ELEMENTWISE

Dimension = tuple[int, int]
"""The number of an argument, and one of its dimensions."""

_At = tuple[ir.Value, int]
"""A dimension of a value."""
_Part = tuple[tuple[object, ...], _At, _At]
"""How a dimension was cut, the part and the whole."""


@dataclass(frozen=True)
class Dimensions:
    """Classes of dimensions, each with a number."""

    _parent: dict[_At, _At] = field(default_factory=dict[_At, _At])
    _parts: list[_Part] = field(default_factory=list[_Part])

    @classmethod
    def of(cls, block: ir.Block) -> Dimensions:
        """Those of a block without calls."""
        found = cls()
        found._visit(block)
        while found._join_wholes():
            pass
        return found

    def classes(self, block: ir.Block) -> dict[Dimension, int]:
        """The class of each dimension of a block's arguments."""
        numbers: dict[_At, int] = {}
        return {
            (n, d): numbers.setdefault(self._find((value, d)), len(numbers))
            for n, value in enumerate(block.arguments)
            for d in range(len(_shape(value)))
        }

    def _find(self, at: _At) -> _At:
        path = [at]
        while (above := self._parent.get(path[-1])) is not None:
            path.append(above)
        for below in path[:-1]:
            self._parent[below] = path[-1]
        return path[-1]

    def _join(self, a: _At, b: _At) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self._parent[a] = b

    def _visit(self, block: ir.Block) -> None:
        for op in list(block.operations)[:-1]:
            for a, b in _equal(op):
                self._join(a, b)
            self._parts.extend(_parts(op))
            for region in op.regions:
                for inner in region.blocks:
                    self._visit(inner)

    def _join_wholes(self) -> bool:
        """Joins the dimensions of which equal parts are one; whether there were any."""
        first: dict[tuple[tuple[object, ...], _At], _At] = {}
        changed = False
        for how, part, whole in self._parts:
            other = first.setdefault((how, self._find(part)), whole)
            if self._find(other) != self._find(whole):
                self._join(other, whole)
                changed = True
        return changed


def _parts(op: ir.OpView) -> Iterator[_Part]:
    """Dimensions that an op cuts into parts, or makes of parts."""
    name = op.operation.name
    if name == "stablehlo.reshape":
        x, y = op.operands[0], op.results[0]
        yield from _split(x, y)
        yield from _split(y, x)
    elif name in ("stablehlo.slice", "stablehlo.dynamic_slice"):
        x, y = op.operands[0], op.results[0]
        for d, (a, b) in enumerate(zip(_shape(x), _shape(y), strict=True)):
            if a != b and b > 1:
                yield (name, a, b), (y, d), (x, d)


def _split(x: ir.Value, y: ir.Value) -> Iterator[_Part]:
    """The dimensions of `x` of which a reshape makes two of `y`."""
    starts = {math.prod(_shape(y)[:d]): d for d, size in enumerate(_shape(y)) if size != 1}
    for d, size in enumerate(_shape(x)):
        before = math.prod(_shape(x)[:d])
        outer = starts.get(before, -1)
        inner = starts.get(before * _shape(y)[outer], -1) if outer >= 0 else -1
        if inner >= 0 and _shape(y)[outer] * _shape(y)[inner] == size:
            how = (_shape(y)[outer], _shape(y)[inner])
            yield ("outer", *how), (y, outer), (x, d)
            yield ("inner", *how), (y, inner), (x, d)


def _shape(value: ir.Value) -> tuple[int, ...]:
    type_ = value.type
    return tuple(type_.shape) if isinstance(type_, ir.RankedTensorType) else ()


_Pairs = Iterator[tuple[_At, _At]]


def _all(a: ir.Value, b: ir.Value) -> _Pairs:
    """All dimensions of two arrays of one shape."""
    if _shape(a) == _shape(b):
        yield from (((a, d), (b, d)) for d in range(len(_shape(a))))


def _equal(op: ir.OpView) -> _Pairs:
    """Dimensions that an op needs to be equal."""
    name = op.operation.name
    if name in ELEMENTWISE or name in _ALIKE:
        for value in (*op.operands, *op.results):
            yield from _all(value, op.results[0])
    elif name in ("stablehlo.optimization_barrier", "stablehlo.sort"):
        for value, result in zip(op.operands, op.results, strict=False):
            yield from _all(value, result if name != "stablehlo.sort" else op.results[0])
    elif name == "stablehlo.custom_call" and len(op.operands) == len(op.results) == 1:
        yield from _all(op.operands[0], op.results[0])
    elif name == "stablehlo.while":
        ends = [terminator(body(op, 1)).operands, body(op, 1).arguments, body(op, 0).arguments]
        for values in (op.operands, *ends):
            for value, result in zip(values, op.results, strict=True):
                yield from _all(value, result)
        yield from _counted_through(body(op, 1))
    elif name in ("stablehlo.case", "stablehlo.if"):
        for region in op.regions:
            for value, result in zip(
                terminator(region.blocks[0]).operands, op.results, strict=True
            ):
                yield from _all(value, result)
    elif name in _RULES:
        yield from _RULES[name](op)


def _counted_through(block: ir.Block) -> _Pairs:
    """The dimensions whose elements a loop reads or writes one by one, by the same counter."""
    first: dict[_At, _At] = {}
    for op in list(block.operations)[:-1]:
        name = op.operation.name
        if name == "stablehlo.dynamic_slice":
            x, window, starts = op.operands[0], op.results[0], list(op.operands)[1:]
        elif name == "stablehlo.dynamic_update_slice":
            x, window, starts = op.operands[0], op.operands[1], list(op.operands)[2:]
        else:
            continue
        for d, start in enumerate(starts):
            counter = _counter(start, block)
            if counter is not None and _shape(window)[d] == 1 < _shape(x)[d]:
                yield (x, d), first.setdefault((counter, _shape(x)[d]), (x, d))


def _counter(value: ir.Value, block: ir.Block) -> ir.Value | None:
    """The one argument of a loop that an index is made of, element by element."""
    found: set[ir.Value] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        owner = value.owner
        if isinstance(owner, ir.Block):
            found.add(value)
        elif owner.name in ELEMENTWISE:
            stack += owner.operands
        elif owner.name != "stablehlo.constant":
            return None
    (counter, *others) = found or {None}
    return None if others or counter not in set(block.arguments) else counter


_ALIKE = {"stablehlo.reverse", "sdy.sharding_constraint"}


def _broadcast(op: ir.OpView) -> _Pairs:
    x, y = op.operands[0], op.results[0]
    for d, to in enumerate(integers(op, "broadcast_dimensions")):
        if _shape(x)[d] == _shape(y)[to]:
            yield (x, d), (y, to)


def _transpose(op: ir.OpView) -> _Pairs:
    for to, d in enumerate(integers(op, "permutation")):
        yield (op.operands[0], d), (op.results[0], to)


def _reshape(op: ir.OpView) -> _Pairs:
    x, y = op.operands[0], op.results[0]
    ahead = {(math.prod(_shape(x)[:d]), size): d for d, size in enumerate(_shape(x)) if size != 1}
    for d, size in enumerate(_shape(y)):
        at = ahead.get((math.prod(_shape(y)[:d]), size))
        if at is not None:
            yield (x, at), (y, d)


def _reduce(op: ir.OpView) -> _Pairs:
    half = len(op.operands) // 2
    gone = integers(op, "dimensions")
    kept = [d for d in range(len(_shape(op.operands[0]))) if d not in gone]
    for x in list(op.operands)[:half]:
        yield from _all(x, op.operands[0])
    for result in op.results:
        yield from (((op.operands[0], d), (result, n)) for n, d in enumerate(kept))


def _dot(op: ir.OpView) -> _Pairs:
    x, y = op.operands
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batching = list(
        zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True)
    )
    contracting = list(
        zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True)
    )
    yield from (((x, a), (y, b)) for a, b in (*batching, *contracting))
    result = 0
    for a, _ in batching:
        yield (x, a), (op.results[0], result)
        result += 1
    for side, value in enumerate((x, y)):
        gone = {pair[side] for pair in (*batching, *contracting)}
        for d in range(len(_shape(value))):
            if d not in gone:
                yield (value, d), (op.results[0], result)
                result += 1


def _convolution(op: ir.OpView) -> _Pairs:
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    x, kernel = op.operands
    (y,) = op.results
    pairs = (
        ((x, numbers.input_batch_dimension), (y, numbers.output_batch_dimension)),
        ((x, numbers.input_feature_dimension), (kernel, numbers.kernel_input_feature_dimension)),
        ((kernel, numbers.kernel_output_feature_dimension), (y, numbers.output_feature_dimension)),
    )
    yield from (it for it in pairs if _size(it[0]) == _size(it[1]))


def _size(at: _At) -> int:
    return _shape(at[0])[at[1]]


def _same_places(op: ir.OpView) -> _Pairs:
    """Of ops that change the sizes of some dimensions: the others."""
    y = op.results[0]
    for x in op.operands:
        if len(_shape(x)) == len(_shape(y)):
            for d, (a, b) in enumerate(zip(_shape(x), _shape(y), strict=True)):
                if a == b:
                    yield (x, d), (y, d)


def _concatenate(op: ir.OpView) -> _Pairs:
    along = get_dimension(op, "dimension")
    for x in op.operands:
        for d in range(len(_shape(x))):
            if d != along:
                yield (x, d), (op.results[0], d)


def _gather(op: ir.OpView) -> _Pairs:
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    yield from _indexed(
        op.operands[0],
        op.operands[1],
        op.results[0],
        list(numbers.offset_dims),
        [*numbers.collapsed_slice_dims, *numbers.operand_batching_dims],
        list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)),
        numbers.index_vector_dim,
    )
    yield from _counted(
        op.operands[0], op.operands[1], list(numbers.start_index_map), numbers.index_vector_dim
    )


def _scatter(op: ir.OpView) -> _Pairs:
    if len(op.results) != 1:
        return
    attr = op.attributes["scatter_dimension_numbers"]
    numbers = stablehlo.ScatterDimensionNumbers(attr)
    yield from _all(op.operands[0], op.results[0])
    yield from _indexed(
        op.operands[0],
        op.operands[1],
        op.operands[2],
        list(numbers.update_window_dims),
        [*numbers.inserted_window_dims, *numbers.input_batching_dims],
        list(zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims, strict=True)),
        numbers.index_vector_dim,
    )
    columns = list(numbers.scattered_dims_to_operand_dims)
    yield from _counted(op.operands[0], op.operands[1], columns, numbers.index_vector_dim)


def _counted(
    sliced: ir.Value, indices: ir.Value, index_map: Sequence[int], vector_dim: int
) -> _Pairs:
    """The rows of an array and the indices that count them: `x[arange(n), labels]`."""
    owner = indices.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.concatenate":
        return
    for column, dim in zip(owner.operands, index_map, strict=False):
        if not _counts(column):
            continue
        for d, size in enumerate(_shape(indices)):
            if d != vector_dim and size == _shape(sliced)[dim]:
                yield (sliced, dim), (indices, d)


def _counts(value: ir.Value) -> bool:
    """Whether a value is made of an iota, or a constant, and nothing else."""
    stack, has_count = [value], False
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, ir.Block):
            return False
        name = owner.name
        has_count = has_count or name == "stablehlo.iota"
        if name == "stablehlo.constant":
            has_count = has_count or not ir.DenseElementsAttr(owner.attributes["value"]).is_splat
        stack += owner.operands
    return has_count


def _indexed(
    sliced: ir.Value,
    indices: ir.Value,
    windows: ir.Value,
    window_dims: list[int],
    gone: list[int],
    batching: Sequence[tuple[int, int]],
    vector_dim: int,
) -> _Pairs:
    yield from (((sliced, a), (indices, b)) for a, b in batching)
    kept = [d for d in range(len(_shape(sliced))) if d not in gone]
    for d, window in zip(kept, window_dims, strict=True):
        if _shape(sliced)[d] == _shape(windows)[window]:
            yield (sliced, d), (windows, window)
    outer = [d for d in range(len(_shape(windows))) if d not in window_dims]
    dims = [d for d in range(len(_shape(indices))) if d != vector_dim]
    yield from (((indices, d), (windows, to)) for d, to in zip(dims, outer, strict=True))


_RULES = {
    "stablehlo.broadcast_in_dim": _broadcast,
    "stablehlo.concatenate": _concatenate,
    "stablehlo.convolution": _convolution,
    "stablehlo.dot_general": _dot,
    "stablehlo.dynamic_slice": _same_places,
    "stablehlo.dynamic_update_slice": _same_places,
    "stablehlo.gather": _gather,
    "stablehlo.pad": _same_places,
    "stablehlo.reduce": _reduce,
    "stablehlo.reduce_window": _same_places,
    "stablehlo.reshape": _reshape,
    "stablehlo.scatter": _scatter,
    "stablehlo.slice": _same_places,
    "stablehlo.transpose": _transpose,
}
