"""Which parts of an op's operands a part of its result needs.

A cut gives the range of elements along some dimensions of a value; it has all elements along the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import shape
from alpa.passes.analysis.micro_batches.contractions import product_dims
from alpa.passes.analysis.micro_batches.shapes import integers
from alpa.passes.analysis.micro_batches.slices import Slices
from alpa.passes.analysis.rows import unchanged_dims
from alpa.passes.analysis.tokens.context import TokenContext
from alpa.passes.analysis.tokens.relation import TokenRelation

Range = tuple[int, int]
Cut = Mapping[int, Range]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One of the slices that a sequence is cut into."""

    number: int
    begin: int
    end: int

    @property
    def own(self) -> Range:
        return (self.begin, self.end)

    @property
    def context(self) -> Range:
        """The tokens up to its end."""
        return (0, self.end)

    def cut(self, relation: TokenRelation) -> dict[int, Range]:
        """The part of a value that belongs to the slice: its tokens, or its queries with all keys
        up to its end."""
        if relation.kind == "tokens":
            return {relation.dims[0]: self.own}
        if relation.kind == "pairs":
            assert relation.query is not None
            return {relation.query: self.own, sum(relation.dims) - relation.query: self.context}
        return {}


def adds_later_queries(context: TokenContext, op: ir.OpView) -> bool:
    """Whether an op adds up, for each key, what the queries make."""
    relation = context.at(op.results[0])
    if relation.kind != "tokens" or relation.late is None:
        return False
    return any(
        it.kind == "pairs" and it.query in _summed(op, n)
        for n, it in enumerate(map(context.at, op.operands))
    )


def operand_cuts(
    context: TokenContext, op: ir.OpView, cut: Cut, span: Span
) -> list[dict[int, Range]]:
    """The cuts of an op's operands for a cut of its results, in a slice."""
    if isinstance(op, stablehlo.DotGeneralOp) or op.operation.name == "stablehlo.dot":
        return _of_product(context, op, cut, span)
    if isinstance(op, stablehlo.ReduceOp):
        kept = _kept(op)
        return [
            _before(context.at(value), kept, cut, span) if shape(value) else {}
            for value in op.operands
        ]
    if isinstance(op, stablehlo.GatherOp | stablehlo.ScatterOp):
        return _of_windows(context, op, cut, span)
    if isinstance(op, stablehlo.BroadcastInDimOp):
        places = dict(enumerate(integers(op, "broadcast_dimensions")))
        before, after = shape(op.operands[0]), shape(op.results[0])
        places = {d: place for d, place in places.items() if before[d] == after[place]}
    elif isinstance(op, stablehlo.TransposeOp):
        places = {old: new for new, old in enumerate(integers(op, "permutation"))}
    elif isinstance(op, stablehlo.ReshapeOp):
        places = unchanged_dims(shape(op.operands[0]), shape(op.results[0]))
    else:
        # Dimensions are in the same places; single numbers, such as that of a pad, stay.
        return [dict(cut) if shape(value) else {} for value in op.operands]
    return [_moved(places, cut)]


def _moved(places: Mapping[int, int], cut: Cut) -> dict[int, Range]:
    return {d: cut[place] for d, place in places.items() if place in cut}


def _kept(op: ir.OpView) -> dict[int, int]:
    """Where the dimensions that a reduction keeps are in its results."""
    dims = integers(op, "dimensions")
    kept = [d for d in range(len(shape(op.operands[0]))) if d not in dims]
    return {d: place for place, d in enumerate(kept)}


def _summed(op: ir.OpView, number: int) -> set[int]:
    """The dimensions of an operand that are summed over."""
    if isinstance(op, stablehlo.ReduceOp):
        return set(integers(op, "dimensions"))
    if isinstance(op, stablehlo.DotGeneralOp) or op.operation.name == "stablehlo.dot":
        return {pair[number] for pair in product_dims(op)[1]}
    return set()


def _before(
    relation: TokenRelation, kept: Mapping[int, int], cut: Cut, span: Span
) -> dict[int, Range]:
    """The cut of an operand whose other dimensions are summed over."""
    found = _moved(kept, cut)
    gone = [d for d in relation.dims if d not in kept]
    for d in gone:
        query = relation.query
        if query is None or d == query:
            found[d] = span.own
        else:
            found[d] = (0, found[query][1]) if query in found else span.context
    return found


def _of_product(
    context: TokenContext, op: ir.OpView, cut: Cut, span: Span
) -> list[dict[int, Range]]:
    _, contracting, places = product_dims(op)
    relations = [context.at(value) for value in op.operands]
    found = [_moved(its, cut) for its in places]
    for pair in contracting:
        # Pairs say which tokens are summed over, for both operands.
        sides = sorted((0, 1), key=lambda n: -len(relations[n].dims))
        side = next((n for n in sides if pair[n] in relations[n].dims), None)
        if side is not None:
            its = _before(relations[side], places[side], cut, span)[pair[side]]
            for n in (0, 1):
                found[n][pair[n]] = its
    return found


def _of_windows(
    context: TokenContext, op: ir.OpView, cut: Cut, span: Span
) -> list[dict[int, Range]]:
    """Of a gather or a scatter."""
    slices = Slices.of(op)
    rows = {row: slices.outer[by] for by, row in slices.batching.items() if by in slices.outer}
    places = {**slices.whole_places, **rows}
    if isinstance(op, stablehlo.GatherOp):
        return [_moved(places, cut), _moved(slices.outer, cut)]
    windows = span.cut(context.at(slices.windows))
    windows |= {places[d]: its for d, its in cut.items() if d in places}
    return [dict(cut), _moved(slices.outer, windows), windows]


def resized(op: ir.OpView, cut: Cut) -> dict[str, ir.Attribute]:
    """The attributes that are others in an op whose result is cut."""
    sizes = {d: end - begin for d, (begin, end) in cut.items()}
    if isinstance(op, stablehlo.SliceOp):
        limits = [sizes.get(d, it) for d, it in enumerate(integers(op, "limit_indices"))]
        return {"limit_indices": ir.DenseI64ArrayAttr.get(limits)}
    if isinstance(op, stablehlo.GatherOp):
        at = Slices.of(op).whole_places
        windows = [sizes.get(at.get(d, -1), it) for d, it in enumerate(integers(op, "slice_sizes"))]
        return {"slice_sizes": ir.DenseI64ArrayAttr.get(windows)}
    if isinstance(op, stablehlo.ConstantOp):
        attr = ir.DenseElementsAttr(op.attributes["value"])
        type_ = cut_type(op.results[0].type, cut)
        return {"value": ir.DenseElementsAttr.get_splat(type_, attr.get_splat_value())}
    return {}


def cut_type(type_: ir.Type, cut: Cut) -> ir.RankedTensorType:
    """A tensor type with the sizes of a cut."""
    whole = ir.RankedTensorType(type_)
    sizes = list(whole.shape)
    for d, (begin, end) in cut.items():
        sizes[d] = end - begin
    nowhere = ir.Location.unknown(type_.context)
    return ir.RankedTensorType.get(sizes, whole.element_type, whole.encoding, loc=nowhere)
