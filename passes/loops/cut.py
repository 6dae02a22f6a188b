"""Cuts stacks and the loops over them: builds the new body of @main op by op.

A loop becomes one loop per part of its stack, or the straight ops of its body where the part is
one row. Between them only what the loop carries from trip to trip flows on: each part reads and
writes its own rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from alpa.dialects import body, filled, ir, stablehlo, terminator
from alpa.passes.analysis.graph import (
    combiner,
    read_inside,
    replace_operands,
    shape,
    splat,
    used_values,
)
from alpa.passes.analysis.rows import operand_dims
from alpa.passes.loops.layer_loops import LayerLoop

Rows = tuple[tuple[int, int], ...]
"""The rows, from and to, of each part of a stack."""


@dataclass(frozen=True)
class Cut:
    """How a value is cut: along which dimension, and at which rows."""

    dim: int
    rows: Rows

    def types(self, value: ir.Value) -> list[ir.Type]:
        """The types of a value's parts."""
        type_ = ir.RankedTensorType(value.type)
        found: list[ir.Type] = []
        for start, stop in self.rows:
            sizes = [*type_.shape]
            sizes[self.dim] = stop - start
            found.append(ir.RankedTensorType.get(sizes, type_.element_type, type_.encoding))
        return found


@dataclass(frozen=True)
class Cutter:
    """Copies ops into a block, those on stacks once per part.

    `cuts` are the values that are stacks; `loops`, by their first results, those to cut and where.
    `parts` maps a value of the old body and a cut to its replacement: its parts, or one value for
    None, which cuts nothing. Other forms are made on demand, by slices or a concatenation.
    """

    block: ir.Block
    cuts: Mapping[ir.Value, Cut]
    loops: Mapping[ir.Value, tuple[LayerLoop, Rows]]
    parts: dict[ir.Value, dict[Cut | None, list[ir.Value]]] = field(
        default_factory=dict[ir.Value, dict[Cut | None, list[ir.Value]]]
    )

    def copy(self, op: ir.OpView) -> None:
        """Copies an op of the old body; the values that it reads are there."""
        with ir.InsertionPoint(self.block), op.location:
            if len(op.results) and op.results[0] in self.loops:
                self._cut_loop(*self.loops[op.results[0]])
            elif not self._copy_parts(op) and not self._reduce_parts(op):
                known = self._known(used_values(op))
                clone = op.operation.clone().opview
                replace_operands(clone, known)
                for old, new in zip(op.results, clone.results, strict=True):
                    self.parts[old] = {None: [new]}

    def get(self, value: ir.Value) -> ir.Value:
        """What stands for a value as a whole."""
        return self.get_parts(value, None)[0]

    def get_parts(self, value: ir.Value, cut: Cut | None) -> list[ir.Value]:
        """What stands for the parts of a value."""
        known, sizes = self.parts[value], shape(value)
        if cut in known:
            return known[cut]
        if cut is None:
            other, parts = next((c, parts) for c, parts in known.items() if c is not None)
            return known.setdefault(None, [stablehlo.concatenate(parts, other.dim)])
        whole, found = self.get(value), list[ir.Value]()
        for start, stop in cut.rows:
            starts, stops = [0] * len(sizes), list(sizes)
            starts[cut.dim], stops[cut.dim] = start, stop
            found.append(stablehlo.slice(whole, starts, stops, [1] * len(sizes)))
        return known.setdefault(cut, found)

    def _known(self, values: Iterable[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Those of the values that are the old body's own -> what stands for them."""
        return {v: self.get(v) for v in values if v in self.parts}

    def _copy_parts(self, op: ir.OpView) -> bool:
        """Copies an op once per part, where its results are stacks and it allows that."""
        cut = self.cuts.get(op.results[0]) if len(op.results) else None
        dims = None if cut is None else operand_dims(op, cut.dim)
        if cut is None or dims is None:
            return False
        operands = [
            [self.get(operand)] * len(cut.rows)
            if dim is None
            else self.get_parts(operand, Cut(dim, cut.rows))
            for operand, dim in zip(op.operands, dims, strict=True)
        ]
        types = [cut.types(result) for result in op.results]
        for k in range(len(cut.rows)):
            clone = op.operation.clone().opview
            for i, parts in enumerate(operands):
                clone.operation.operands[i] = parts[k]
            for old, new, of_parts in zip(op.results, clone.results, types, strict=True):
                new.set_type(of_parts[k])
                self.parts.setdefault(old, {}).setdefault(cut, []).append(new)
            if isinstance(op, stablehlo.ConstantOp):
                value = ir.DenseElementsAttr(op.value).get_splat_value()
                new_type = clone.results[0].type
                clone.attributes["value"] = ir.DenseElementsAttr.get_splat(new_type, value)
        return True

    def _reduce_parts(self, op: ir.OpView) -> bool:
        """Reduces the parts of a stack one by one, then what they give: a norm's partial sums are
        computed where the parts are."""
        if not isinstance(op, stablehlo.ReduceOp) or len(op.results) != 1:
            return False
        source, init = op.operands
        cut, name = self.cuts.get(source), _associative(op)
        if cut is None or cut not in self.parts.get(source, {}) or name is None:
            return False
        partial: list[ir.Value] = []
        for part in self.parts[source][cut]:
            clone = op.operation.clone().opview
            clone.operation.operands[0] = part
            clone.operation.operands[1] = self.get(init)
            partial.append(clone.results[0])
        total, *others = partial
        for other in others:
            combined = ir.Operation.create(name, [total.type], [total, other])
            total = combined.results[0]
        self.parts[op.results[0]] = {None: [total]}
        return True

    def _cut_loop(self, loop: LayerLoop, rows: Rows) -> None:
        op, variables = loop.op, range(len(loop.op.operands))
        cuts = {c: Cut(dim, rows) for c, dim in loop.stacks.items()}
        now = {c: self.get(op.operands[c]) for c in variables if c not in cuts}
        made = {c: self.get_parts(op.operands[c], cut).copy() for c, cut in cuts.items()}
        part_numbers = range(len(rows))
        for k in reversed(part_numbers) if loop.backwards else part_numbers:
            start, stop = rows[k]
            first = loop.first_trip(start, stop)
            now.update((c, parts[k]) for c, parts in made.items())
            now |= _counts(loop, first)
            if stop - start == 1:
                results = self._one_trip(loop, now)
            else:
                results = self._fewer_trips(loop, first, stop - start, now)
            for c in variables:
                if c in made:
                    made[c][k] = results[c]
                else:
                    now[c] = results[c]
        now |= _counts(loop, loop.trips)
        for c, result in enumerate(op.results):
            self.parts[result] = {cuts.get(c): made[c] if c in made else [now[c]]}

    def _one_trip(self, loop: LayerLoop, variables: Mapping[int, ir.Value]) -> Sequence[ir.Value]:
        """The ops of the loop's body; the loop's variables before the trip -> after it."""
        block = body(loop.op, 1)
        inside = self._known(read_inside(loop.op))
        inside |= {block.arguments[c]: value for c, value in variables.items()}
        *ops, end = block.operations
        for op in ops:
            if len(op.results) and op.results[0] in loop.accesses:
                # The part is a single row: a read returns the part, a write replaces it.
                written = isinstance(op, stablehlo.DynamicUpdateSliceOp)
                inside[op.results[0]] = inside[op.operands[int(written)]]
                continue
            clone = op.operation.clone().opview
            replace_operands(clone, inside)
            inside.update(zip(op.results, clone.results, strict=True))
        return [inside[value] for value in end.operands]

    def _fewer_trips(
        self, loop: LayerLoop, first: int, trips: int, variables: Mapping[int, ir.Value]
    ) -> Sequence[ir.Value]:
        """A loop of some of the trips, from `first` on. It counts from 0, so that equal parts are
        equal ops; where the body uses the counter for more than its rows, `first` is added."""
        counter = loop.counter.index
        number = loop.op.operands[counter].type
        before = {**variables, counter: _constant(number, 0)}
        outer = self._known(read_inside(loop.op))
        clone = loop.op.operation.clone().opview
        replace_operands(clone, outer)
        for c, value in before.items():
            clone.operands[c] = value
            clone.results[c].set_type(value.type)
            for region in clone.regions:
                region.blocks[0].arguments[c].set_type(value.type)
        block = body(clone, 1)
        accesses = [
            new
            for old, new in zip(body(loop.op, 1).operations, block.operations, strict=True)
            if len(old.results) and old.results[0] in loop.accesses
        ]
        comparison = terminator(body(clone, 0)).operands[0].owner
        with ir.InsertionPoint(comparison):
            comparison.operands[1] = _constant(number, trips)
        local = block.arguments[counter]
        with ir.InsertionPoint.at_block_begin(block):
            trip = stablehlo.AddOp(local, _constant(number, first))
            local.replace_all_uses_except(trip.result, trip.operation)
            row = stablehlo.subtract(_constant(number, trips - 1), local)
            row = row if loop.backwards else local
        for access in accesses:
            _take_row(access, row, loop)
        with ir.InsertionPoint(terminator(block)):
            terminator(block).operands[counter] = stablehlo.add(local, _constant(number, 1))
        return list(clone.results)


def _counts(loop: LayerLoop, trip: int) -> dict[int, ir.Value]:
    """What the loop's counting variables are at a trip, or after the last one."""
    return {c: _constant(loop.op.operands[c].type, v[trip]) for c, v in loop.counts.items()}


def _take_row(access: ir.OpView, row: ir.Value, loop: LayerLoop) -> None:
    """Makes an op read or write this row of its stack, which has been cut."""
    stack = access.operands[0]
    written = isinstance(access, stablehlo.DynamicUpdateSliceOp)
    index = 1 + int(written) + loop.stacks[ir.BlockArgument(stack).arg_number]
    if access.operands[index].type != row.type:
        with ir.InsertionPoint(access):
            row = stablehlo.convert(access.operands[index].type, row)
    access.operands[index] = row
    if written:
        access.results[0].set_type(stack.type)


def _constant(type_: ir.Type, number: int) -> ir.Value:
    """An integer scalar of a tensor type."""
    return filled(ir.RankedTensorType(type_), number)


def _associative(op: stablehlo.ReduceOp) -> str | None:
    """The op that combines the partial results of a reduction, or None if there is none."""
    # Each partial result starts from the initial value: it may count once only.
    name, start = combiner(op), splat(op.operands[1])
    neutral = {"stablehlo.add": 0, "stablehlo.multiply": 1}
    if name in neutral:
        return name if start == neutral[name] else None
    idempotent = ("stablehlo.and", "stablehlo.maximum", "stablehlo.minimum", "stablehlo.or")
    return name if name in idempotent else None
