"""Writes the ops of a fragment for one token slice.

A value is asked for in a cut, and made of cuts of what it is computed from. Rows of earlier slices
are **state**: in a forward fragment, arguments that hold what the earlier fragments made; in a
backward fragment, they are what forward fragments have handed on. Ops that add up what the queries
of a slice send back to keys make rows of earlier slices, too: these are handed on as they are, and
the rows of this slice are complete once what later slices handed on is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alpa.dialects import ir, stablehlo
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.analysis.graph import read_inside, replace_operands, shape
from alpa.passes.analysis.op_kinds import DATA_MOVEMENT, ELEMENTWISE
from alpa.passes.analysis.tokens.context import TokenContext
from alpa.passes.analysis.tokens.relation import TokenRelation
from alpa.passes.base import PassError
from alpa.passes.tokens.cuts import (
    Cut,
    Range,
    Span,
    adds_later_queries,
    cut_type,
    operand_cuts,
    resized,
)

_THROUGH = ELEMENTWISE | {"stablehlo.broadcast_in_dim"}
"""Ops that are cut along any dimension without computing more than that cut."""
_AGAIN = _THROUGH | DATA_MOVEMENT | {"stablehlo.reshape", "stablehlo.transpose"}
"""Ops that a backward part may compute again for earlier tokens."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """What stands for an argument of the fragment in a slice."""

    whole: ir.Value | None = None
    """all of it; otherwise"""
    rows: Sequence[ir.Value] = ()
    """what each slice up to this one made of it, in order; of values without rows, the last"""


_Key = tuple[ir.Value, tuple[tuple[int, Range], ...]]


@dataclass(frozen=True, kw_only=True)
class Slicer:
    """Writes into a block whose arguments it adds as it needs them."""

    context: TokenContext
    span: Span
    block: ir.Block
    given: Callable[[ir.BlockArgument], Given]
    """what stands for an argument of the fragment"""
    earlier: Callable[[ir.Value], Sequence[ir.Value]] | None
    """in forward fragments: the rows of a value that each earlier slice's fragment has returned"""
    later: Callable[[ir.Value], ir.Value | None]
    """what later slices hand on for the keys up to the end of this slice"""
    inputs: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """values outside -> the block's arguments"""
    made: dict[_Key, ir.Value] = field(default_factory=dict[_Key, ir.Value])
    """cuts of the fragment's values"""
    sums: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """of what this and later slices send back to keys"""

    def own(self, value: ir.Value) -> ir.Value:
        """The part of a value that belongs to the slice."""
        return self.get(value, self.span.cut(self.context.at(value)))

    def write_all(self, block: ir.Block) -> None:
        """Writes the ops of a fragment's block in order, some of them for nothing."""
        for op in list(block.operations)[:-1]:
            for result in op.results:
                self.own(result)

    def input(self, outside: ir.Value) -> ir.Value:
        """The argument for a value outside."""
        if outside not in self.inputs:
            type_ = MeshTensor.from_type(outside.type).type
            self.inputs[outside] = self.block.add_argument(type_, outside.location)
        return self.inputs[outside]

    def get(self, value: ir.Value, cut: Cut) -> ir.Value:
        """A cut of a value."""
        sizes = shape(value)
        cut = {d: it for d, it in sorted(cut.items()) if it != (0, sizes[d])}
        key = (value, tuple(cut.items()))
        if key not in self.made:
            self.made[key] = self._made(value, cut)
        return self.made[key]

    def handed_on(self, value: ir.Value) -> ir.Value:
        """What this and later slices make of the rows of all earlier ones."""
        (dim,) = self.context.at(value).dims
        return self._slice(self._added_up(value), {dim: (0, self.span.begin)})

    def total(self, value: ir.Value, before: ir.Value | None) -> ir.Value:
        """A sum over the slices so far, of which those before have made a part."""
        own = self.own(value)
        return own if before is None else self._added(own, self.input(before))

    def joined(self, rows: Sequence[ir.Value], dim: int) -> ir.Value:
        """Rows one after the other."""
        if len(rows) == 1:
            return rows[0]
        with ir.InsertionPoint(self.block), rows[0].location:
            return stablehlo.ConcatenateOp(rows, dim).result

    def _made(self, value: ir.Value, cut: Cut) -> ir.Value:
        relation = self.context.at(value)
        if isinstance(value.owner, ir.Block):
            return self._argument(ir.BlockArgument(value), relation, cut)
        result = ir.OpResult(value)
        op = result.owner.opview
        if op.operation.name == "stablehlo.optimization_barrier":
            return self.get(op.operands[result.result_number], cut)
        if op.operation.name in _THROUGH and self._goes_through(op, relation, cut):
            return self._write(op, result.result_number, cut)
        if relation.is_fixed:
            return self._of_fixed(op, result.result_number, cut)
        tokens = {d: it for d, it in cut.items() if d in relation.dims}
        if len(tokens) < len(cut):
            return self._slice(self.get(value, tokens), _others(cut, tokens))
        if adds_later_queries(self.context, op):
            (dim,) = relation.dims
            own = {dim: cut.get(dim, (0, shape(value)[dim]))}
            return self._slice(self._added_up(value), own)
        if relation.kind == "tokens" and self._is_context(relation, cut):
            return self._context_of(op, value, relation, cut)
        return self._write(op, result.result_number, cut)

    def _goes_through(self, op: ir.OpView, relation: TokenRelation, cut: Cut) -> bool:
        """Whether to cut an op's operands, and not its result."""
        if relation.is_fixed:
            return isinstance(op, stablehlo.BroadcastInDimOp)
        if relation.kind != "tokens" or not self._is_context(relation, cut):
            return True
        # Of earlier slices, what is repeated is the smaller state.
        return isinstance(op, stablehlo.BroadcastInDimOp)

    def _is_context(self, relation: TokenRelation, cut: Cut) -> bool:
        """Whether a cut has tokens of earlier slices."""
        (dim,) = relation.dims
        return self.span.begin > 0 and cut.get(dim, (0, 0))[0] < self.span.begin

    def _argument(self, value: ir.BlockArgument, relation: TokenRelation, cut: Cut) -> ir.Value:
        given = self.given(value)
        if given.whole is not None:
            return self._slice(self.input(given.whole), cut)
        if relation.kind == "tokens":
            (dim,) = relation.dims
            tokens = {dim: cut.get(dim, self.span.context)}
            rows = given.rows if tokens[dim] == self.span.context else given.rows[-1:]
            found = self.joined([self.input(row) for row in rows], dim)
        else:
            tokens = self.span.cut(relation)
            found = self.input(given.rows[-1])
        return self._slice(found, _others(cut, tokens))

    def _of_fixed(self, op: ir.OpView, number: int, cut: Cut) -> ir.Value:
        if cut and isinstance(op, stablehlo.ConstantOp) and _is_splat(op):
            return self._write(op, number, cut)
        if cut:
            return self._slice(self.get(op.results[number], {}), cut)
        return self._write(op, number, cut)

    def _context_of(
        self, op: ir.OpView, value: ir.Value, relation: TokenRelation, cut: Cut
    ) -> ir.Value:
        """The rows of all tokens up to the slice's end."""
        if self.earlier is not None:
            rows = [self.input(row) for row in self.earlier(value)]
            return self.joined([*rows, self.own(value)], relation.dims[0])
        if op.operation.name not in _AGAIN:
            raise PassError(
                op,
                "the backward part computes what attention reads of earlier tokens again, which "
                "token slices would repeat for each slice; keep it from the forward part: plan "
                "with remat=none, and without jax.checkpoint around attention",
            )
        return self._write(op, ir.OpResult(value).result_number, cut)

    def _added_up(self, value: ir.Value) -> ir.Value:
        """What the queries of this and of later slices make, for the keys up to its end."""
        if value not in self.sums:
            result = ir.OpResult(value)
            (dim,) = self.context.at(value).dims
            cut = {dim: self.span.context}
            found = self._write(result.owner.opview, result.result_number, cut)
            later = self.later(value)
            self.sums[value] = found if later is None else self._added(found, self.input(later))
        return self.sums[value]

    def _write(self, op: ir.OpView, number: int, cut: Cut) -> ir.Value:
        """The result of a copy of an op that makes a cut of it."""
        cuts = operand_cuts(self.context, op, cut, self.span)
        operands = [self.get(value, its) for value, its in zip(op.operands, cuts, strict=True)]
        with op.operation.context:
            attributes = resized(op, cut) if cut else {}
        read = [it for it in read_inside(op) if it in self.context.relations]
        captured = {it: self.get(it, {}) for it in read}
        clone = op.operation.clone(ip=ir.InsertionPoint(self.block))
        for n, operand in enumerate(operands):
            clone.operands[n] = operand
        if captured:
            replace_operands(clone.opview, captured)
        for name, attribute in attributes.items():
            clone.attributes[name] = attribute
        for n, new in enumerate(clone.results):
            new.set_type(cut_type(new.type, cut))
            if n != number:
                self.made.setdefault((op.results[n], tuple(cut.items())), new)
        return clone.results[number]

    def _slice(self, value: ir.Value, cut: Cut) -> ir.Value:
        """A cut of a value of the block. Ranges count from the value's first element."""
        sizes = shape(value)
        cut = {d: it for d, it in cut.items() if it != (0, sizes[d])}
        if not cut:
            return value
        ranges = [cut.get(d, (0, size)) for d, size in enumerate(sizes)]
        with ir.InsertionPoint(self.block), value.location:
            return stablehlo.SliceOp(
                value, [it[0] for it in ranges], [it[1] for it in ranges], [1] * len(ranges)
            ).result

    def _added(self, one: ir.Value, other: ir.Value) -> ir.Value:
        with ir.InsertionPoint(self.block), one.location:
            return stablehlo.AddOp(one, other).result


def states(context: TokenContext, block: ir.Block, span: Span) -> list[ir.Value]:
    """The values of a forward fragment whose rows later slices read.

    Args:
        span: any slice but the first.
    """
    found: dict[ir.Value, None] = {}
    for op in list(block.operations)[:-1]:
        relations = [context.at(result) for result in op.results]
        if not any(it.kind == "pairs" for it in (*relations, *map(context.at, op.operands))):
            continue
        cuts = operand_cuts(context, op, span.cut(relations[0]), span)
        for value, cut in zip(op.operands, cuts, strict=True):
            source = _repeated(value)
            relation, given = context.at(value), isinstance(source.owner, ir.Block)
            if relation.kind == "tokens" and cut[relation.dims[0]] != span.own and not given:
                found[source] = None
    return list(found)


def _others(cut: Cut, done: Cut) -> dict[int, Range]:
    """What is left of a cut."""
    return {d: it for d, it in cut.items() if d not in done}


def _repeated(value: ir.Value) -> ir.Value:
    """What broadcasts repeat to make a value."""
    while not isinstance(value.owner, ir.Block):
        result = ir.OpResult(value)
        op = result.owner.opview
        if not isinstance(op, stablehlo.BroadcastInDimOp | stablehlo.OptimizationBarrierOp):
            break
        value = op.operands[result.result_number]
    return value


def _is_splat(op: stablehlo.ConstantOp) -> bool:
    attr = op.attributes["value"]
    return isinstance(attr, ir.DenseElementsAttr) and attr.is_splat
