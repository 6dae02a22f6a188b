"""Rules of ops that move elements: a token's row moves as a whole, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import combiner, shape, splat
from alpa.passes.analysis.micro_batches.shapes import integer, integers
from alpa.passes.analysis.micro_batches.slices import Slices
from alpa.passes.analysis.rows import unchanged_dims
from alpa.passes.analysis.tokens.context import Operands, TokenContext, first_late, moved
from alpa.passes.analysis.tokens.elementwise import of_sums
from alpa.passes.analysis.tokens.relation import FIXED, TokenRelation, mixing, tokens


def broadcast_in_dim(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    (x,) = operands
    dims = integers(op, "broadcast_dimensions")
    before, after = shape(op.operands[0]), shape(op.results[0])
    if any(before[d] != after[dims[d]] for d in x.dims):
        return mixing(op, "repeats a sequence of one token")
    found = moved(x, lambda d: dims[d])
    assert found is not None
    return found


def transpose(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    places = {old: new for new, old in enumerate(integers(op, "permutation"))}
    found = moved(operands[0], places.get)
    assert found is not None
    return found


def reshape(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    (x,) = operands
    places = unchanged_dims(shape(op.operands[0]), shape(op.results[0]))
    found = moved(x, places.get)
    return mixing(op, "joins the dimension of the tokens with others") if found is None else found


def along_others(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    """Slices, pads, reversals, concatenations and sorts: none may be along the tokens."""
    if all(it.is_fixed for it in operands):
        return FIXED
    if any(it.kind == "sum" for it in operands):
        linear = isinstance(op, stablehlo.SliceOp | stablehlo.ReverseOp)
        return operands[0] if linear else of_sums(op, operands)
    (x, *others) = (it for it in operands if not it.is_fixed)
    if any(it.dims != x.dims or it.kind != x.kind for it in others):
        return mixing(op, "joins arrays whose tokens are along other dimensions")
    if any(d in _touched(op) for d in x.dims):
        return mixing(op, "moves tokens to other places in the sequence, or leaves some out")
    if x.kind == "pairs" and others:
        return mixing(op, "joins scores of attention")
    beyond = x.beyond if isinstance(op, stablehlo.SliceOp | stablehlo.ReverseOp) else None
    return replace(x, late=first_late(operands), beyond=beyond)


def _touched(op: ir.OpView) -> set[int]:
    """The dimensions along which elements move."""
    sizes = shape(op.operands[0])
    if isinstance(op, stablehlo.SliceOp):
        return {d for d, size in enumerate(shape(op.results[0])) if size != sizes[d]}
    if isinstance(op, stablehlo.PadOp):
        names = ("edge_padding_low", "edge_padding_high", "interior_padding")
        padding = zip(*(integers(op, name) for name in names), strict=True)
        return {d for d, sizes in enumerate(padding) if any(sizes)}
    if isinstance(op, stablehlo.ReverseOp):
        return set(integers(op, "dimensions"))
    if op.operation.name == "chlo.top_k":
        return {len(sizes) - 1}
    return {integer(op, "dimension")}


def gather(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    if all(it.is_fixed for it in operands):
        return FIXED
    x, indices = operands
    slices = Slices.of(op)
    found = _windows(slices, x, indices)
    return found or mixing(op, "picks from several tokens")


def scatter(_: TokenContext, op: ir.OpView, operands: Operands) -> TokenRelation:
    if all(it.is_fixed for it in operands):
        return FIXED
    if len(operands) != 3:
        return mixing(op, "writes several arrays at once")
    x, indices, updates = operands
    slices = Slices.of(op)
    windows = _windows(slices, x, indices, updates)
    if windows is None or windows.dims != updates.dims or updates.kind != "tokens":
        return mixing(op, "writes rows of several tokens together")
    (dim,) = windows.dims
    late = first_late(operands)
    of_rows = {slices.outer[by]: row for by, row in slices.batching.items() if by in slices.outer}
    places = {place: d for d, place in slices.whole_places.items()} | of_rows
    if dim in places:
        fits = x.is_fixed or x.dims == (places[dim],)
        return tokens(places[dim], late) if fits else mixing(op, "writes rows of other tokens")
    adds = combiner(op) == "stablehlo.add" and splat(op.operands[0]) == 0
    if adds:
        return TokenRelation(kind="sum", late=late)
    return mixing(op, "writes what tokens make into an array of all tokens, not by a sum from 0")


def _windows(
    slices: Slices, x: TokenRelation, indices: TokenRelation, updates: TokenRelation | None = None
) -> TokenRelation | None:
    """The relation of the windows of a gather, or of those that a scatter writes."""
    parts = [it for it in (x, indices, updates) if it is not None]
    if any(it.kind not in ("fixed", "tokens") for it in parts):
        return None
    places: set[int | None] = set()
    if indices.dims:
        (dim,) = indices.dims
        row = slices.batching.get(dim)
        if x.dims and x.dims != (row,):
            return None
        places.add(slices.outer.get(dim))
    elif x.dims:
        (dim,) = x.dims
        by = next((by for by, row in slices.batching.items() if row == dim), None)
        places.add(slices.whole_places.get(dim) if by is None else slices.outer.get(by))
    if updates is not None and updates.dims:
        places.add(updates.dims[0])
    place = places.pop() if len(places) == 1 else None
    return None if place is None else tokens(place, first_late(parts))
