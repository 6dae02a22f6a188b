"""Classes of tied dimensions of a program's arguments: the evidence for which ones hold samples.

Two dimensions are tied if an op requires them to be equal: those of the operands of an addition,
those that a product sums over, those of a batch of indices and of the rows that it reads. Equal
sizes alone do not tie dimensions: class weights that are looked up by labels share no dimension
with the batch, even if there are as many classes as samples.

Two dimensions are also tied if they have the same size and equal parts of them are tied
(`x.reshape(2, -1, 6)` beside `y.reshape(2, -1)`), or if one loop counter indexes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.graph import shape
from alpa.passes.analysis.micro_batches.contractions import Product
from alpa.passes.analysis.micro_batches.shapes import integer
from alpa.passes.analysis.micro_batches.slices import Slices
from alpa.passes.analysis.op_kinds import ELEMENTWISE
from alpa.passes.analysis.rows import same_rows

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
            for d in range(len(shape(value)))
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
        for d, (a, b) in enumerate(zip(shape(x), shape(y), strict=True)):
            if a != b and b > 1:
                yield (name, a, b), (y, d), (x, d)


def _split(x: ir.Value, y: ir.Value) -> Iterator[_Part]:
    """The dimensions of `x` of which a reshape makes two of `y`."""
    starts = {math.prod(shape(y)[:d]): d for d, size in enumerate(shape(y)) if size != 1}
    for d, size in enumerate(shape(x)):
        before = math.prod(shape(x)[:d])
        outer = starts.get(before, -1)
        inner = starts.get(before * shape(y)[outer], -1) if outer >= 0 else -1
        if inner >= 0 and shape(y)[outer] * shape(y)[inner] == size:
            how = (shape(y)[outer], shape(y)[inner])
            yield ("outer", *how), (y, outer), (x, d)
            yield ("inner", *how), (y, inner), (x, d)


_Pairs = Iterator[tuple[_At, _At]]


def _all(a: ir.Value, b: ir.Value) -> _Pairs:
    """All dimensions of two arrays of one shape."""
    if shape(a) == shape(b):
        yield from (((a, d), (b, d)) for d in range(len(shape(a))))


def _each(a: Iterable[ir.Value], b: Iterable[ir.Value]) -> _Pairs:
    """All dimensions of pairs of arrays."""
    for one, other in zip(a, b, strict=True):
        yield from _all(one, other)


def _equal(op: ir.OpView) -> _Pairs:
    """Dimensions that an op needs to be equal."""
    name = op.operation.name
    for first, *others in same_rows(op):
        yield from ((first, other) for other in others)
    if name in ("stablehlo.reverse", "sdy.sharding_constraint"):
        yield from _all(op.operands[0], op.results[0])
    elif name == "stablehlo.optimization_barrier":
        yield from _each(op.operands, op.results)
    elif name == "stablehlo.sort":
        yield from _each(op.operands, [op.results[0]] * len(op.operands))
    elif name == "stablehlo.custom_call" and len(op.operands) == len(op.results) == 1:
        yield from _each(op.operands, op.results)
    elif name == "stablehlo.while":
        ends = [terminator(body(op, 1)).operands, body(op, 1).arguments, body(op, 0).arguments]
        for values in (op.operands, *ends):
            yield from _each(values, op.results)
        yield from _counted_through(body(op, 1))
    elif name in ("stablehlo.case", "stablehlo.if"):
        for region in op.regions:
            yield from _each(terminator(region.blocks[0]).operands, op.results)
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
            if counter is not None and shape(window)[d] == 1 < shape(x)[d]:
                yield (x, d), first.setdefault((counter, shape(x)[d]), (x, d))


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


def _product(op: ir.OpView) -> _Pairs:
    x, y = op.operands
    dims = Product.of(op)
    yield from (((x, a), (y, b)) for a, b in (*dims.batching, *dims.contracting))
    for value, place in zip((x, y), dims.places, strict=True):
        yield from (((value, d), (op.results[0], to)) for d, to in place.items())


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
    return shape(at[0])[at[1]]


def _same_places(op: ir.OpView) -> _Pairs:
    """Of ops that change the sizes of some dimensions: the others."""
    y = op.results[0]
    for x in op.operands:
        if len(shape(x)) == len(shape(y)):
            for d, (a, b) in enumerate(zip(shape(x), shape(y), strict=True)):
                if a == b:
                    yield (x, d), (y, d)


def _concatenate(op: ir.OpView) -> _Pairs:
    along = integer(op, "dimension")
    for x in op.operands:
        for d in range(len(shape(x))):
            if d != along:
                yield (x, d), (op.results[0], d)


def _slices(op: ir.OpView) -> _Pairs:
    """Of a gather or a scatter."""
    if len(op.results) != 1:
        return
    it = Slices.of(op)
    sliced, indices, windows = it.sliced, it.indices, it.windows
    if isinstance(op, stablehlo.ScatterOp):
        yield from _all(sliced, op.results[0])
    yield from (((sliced, a), (indices, b)) for b, a in it.batching.items())
    yield from (((indices, d), (windows, to)) for d, to in it.outer.items())
    pairs = (((sliced, d), (windows, to)) for d, to in it.places.items())
    yield from (pair for pair in pairs if _size(pair[0]) == _size(pair[1]))
    # The rows of an array and the indices that count them: `x[arange(n), labels]`.
    columns = it.columns if len(it.columns) > 1 else []
    for column, dim in zip(columns, it.numbered, strict=False):
        if _counts(column):
            rows = (((sliced, dim), (indices, d)) for d in it.outer)
            yield from (pair for pair in rows if _size(pair[0]) == _size(pair[1]))


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


_RULES = {
    "stablehlo.concatenate": _concatenate,
    "stablehlo.convolution": _convolution,
    "stablehlo.dot_general": _product,
    "stablehlo.dynamic_slice": _same_places,
    "stablehlo.dynamic_update_slice": _same_places,
    "stablehlo.gather": _slices,
    "stablehlo.pad": _same_places,
    "stablehlo.reduce_window": _same_places,
    "stablehlo.scatter": _slices,
    "stablehlo.slice": _same_places,
}
