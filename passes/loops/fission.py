"""Splits loops and barriers by their results: what some values wait for, and the rest.

The backward loop over layers carries the gradient of the activations from trip to trip, and writes
the gradients of the weights, which no trip reads. It becomes two loops:

    %r:3 = while(%i = 0, %d = %ct, %g = %zeros) {       // %d: carried; %g: a stack of gradients
      %e = f(%d);  %w = dot(%e, %x[i])
      return %i + 1, h(%e), %g with %w at i }

    %p:3 = while(%i = 0, %d = %ct, %s = %zeros) {       // %s: a stack of the %e
      %e = f(%d);  return %i + 1, h(%e), %s with %e at i }
    %q:2 = while(%i = 0, %g = %zeros) {
      %w = dot(%p#2[i], %x[i]);  return %i + 1, %g with %w at i }

The second loop reads what the first one has computed from stacks, one row per trip. It computes
again what depends on the trip's number and on constants of the loop alone and takes nearly nothing:
indices, and rows of tensors that exist anyway. Both loops run the same ops on the same numbers as
the one loop, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa.dialects import body, filled, ir, stablehlo, terminator
from alpa.dialects.sharding import Sharding, op_shardings, set_op_shardings
from alpa.passes.analysis.graph import replace_operands, used_values
from alpa.passes.analysis.op_cost import loop_counter
from alpa.passes.analysis.op_kinds import BROADCASTS, DATA_MOVEMENT, ELEMENTWISE, SOURCES
from alpa.passes.loops.dependence import (
    condition_variables,
    ops_leading_to,
    reads,
    variables_leading_to,
)

_CHEAP = BROADCASTS | DATA_MOVEMENT | SOURCES | {"stablehlo.reshape", "stablehlo.transpose"}
"""Ops that are computed again rather than stored, if they read nothing that has to be stored."""


def split_at(block: ir.Block, wanted: Iterable[ir.Value]) -> None:
    """Splits the loops and barriers of a block, and those inside, in place.

    Afterwards the wanted values depend on no op that also leads to others only: each loop and each
    barrier of which they need some results makes no others that anyone reads. A loop stays whole if
    its trips are not counted from 0 in steps of 1, or if a row to be stored is a partial sum.
    """
    found = set(wanted)
    for op in reversed(list(block.operations)[:-1]):
        needed = [number for number, result in enumerate(op.results) if result in found]
        if not needed:
            continue
        if isinstance(op, stablehlo.OptimizationBarrierOp):
            found |= {op.operands[number] for number in needed}
            _split_barrier(op, needed)
        elif isinstance(op, stablehlo.WhileOp):
            first = _split_loop(op, needed)
            found |= reads(first, range(len(first.results)))
        else:
            found.update(used_values(op))


def _split_barrier(op: stablehlo.OptimizationBarrierOp, needed: Sequence[int]) -> None:
    """Replaces a barrier by one of the needed values and one of the rest."""
    rest = [n for n, result in enumerate(op.results) if n not in needed and _is_used(result)]
    if not rest:
        return
    shardings = op_shardings(op)
    for numbers in (list(needed), rest):
        with ir.InsertionPoint(op), op.location:
            part = stablehlo.OptimizationBarrierOp([op.operands[n] for n in numbers])
        if shardings is not None:
            set_op_shardings(part, tuple(shardings[n] for n in numbers))
        for number, result in zip(numbers, part.results, strict=True):
            op.results[number].replace_all_uses_with(result)
    op.operation.erase()


def _split_loop(op: stablehlo.WhileOp, needed: Sequence[int]) -> ir.OpView:
    """Replaces a loop by two; the one that makes what is needed, or the loop if it stays whole."""
    counter = loop_counter(op)
    variables = variables_leading_to(op, needed)
    if not _rest(op, variables):
        return op
    if counter is None or counter.values.start != 0 or counter.values.step != 1:
        return op
    returned = terminator(body(op, 1)).operands
    split_at(body(op, 1), [returned[v] for v in sorted(variables)])
    # Loops inside that stay whole need more.
    variables = _closed(op, variables)
    rest = _rest(op, variables)
    if not rest:
        return op
    split = _Split(op, counter.index, counter.trips, frozenset(variables), tuple(rest))
    if any(it is not None and it.unreduced for it in map(split.sharding, split.stored)):
        return op
    first = split.first()
    split.second(first)
    op.operation.erase()
    return first


def _rest(op: stablehlo.WhileOp, variables: Collection[int]) -> list[int]:
    """The results that are read, without those of some variables."""
    return [n for n, result in enumerate(op.results) if n not in variables and _is_used(result)]


def _closed(op: stablehlo.WhileOp, variables: Collection[int]) -> set[int]:
    """Some variables of a loop, with those that their ops read."""
    block = body(op, 1)
    returned, arguments = terminator(block).operands, list(block.arguments)
    found, waiting = set[int](), {*variables}
    while waiting - found:
        found |= waiting
        wanted = [returned[v] for v in found]
        read = {v for it in ops_leading_to(block, wanted) for v in used_values(it)} | {*wanted}
        waiting = {v for v, argument in enumerate(arguments) if argument in read}
    return found


@dataclass(frozen=True)
class _Split:
    """A loop, and how its variables and ops are dealt out to two loops."""

    op: stablehlo.WhileOp
    counter: int
    trips: int
    variables: frozenset[int]
    """of the first loop"""
    wanted: tuple[int, ...]
    """those of the second loop that are read after it"""
    _cheap: dict[ir.Value, bool] = field(default_factory=dict[ir.Value, bool])

    @property
    def block(self) -> ir.Block:
        return body(self.op, 1)

    @cached_property
    def returned(self) -> list[ir.Value]:
        return [*terminator(self.block).operands]

    @cached_property
    def arguments(self) -> dict[ir.Value, int]:
        """The variables of the body's arguments."""
        return {argument: v for v, argument in enumerate(self.block.arguments)}

    @cached_property
    def ops(self) -> list[ir.OpView]:
        """Those of the body, without its end."""
        return [*self.block.operations][:-1]

    @cached_property
    def own(self) -> list[int]:
        """The variables of the second loop that the first one lacks: the wanted ones, and what they
        depend on."""
        return sorted(_closed(self.op, self.wanted) - self.variables)

    @cached_property
    def first_ops(self) -> list[ir.OpView]:
        """What the first loop computes."""
        return ops_leading_to(self.block, (self.returned[v] for v in self.variables))

    @cached_property
    def second_ops(self) -> list[ir.OpView]:
        """What only the second loop computes."""
        first = set(self.first_ops)
        every = ops_leading_to(self.block, (self.returned[v] for v in self.own))
        return [op for op in every if op not in first]

    @cached_property
    def _makers(self) -> dict[ir.Value, ir.OpView]:
        return {result: op for op in self.ops for result in op.results}

    @cached_property
    def _made_first(self) -> dict[ir.Value, ir.OpView]:
        return {result: op for op in self.first_ops for result in op.results}

    @cached_property
    def _crossing(self) -> list[ir.Value]:
        """What the second loop reads of the first: its results, and variables at a trip's begin."""
        read = [value for op in self.second_ops for value in used_values(op)]
        read += [self.returned[v] for v in self.own]
        return [
            value
            for value in dict.fromkeys(read)
            if value in self._made_first or self.arguments.get(value) in self.variables
        ]

    @cached_property
    def stored(self) -> list[ir.Value]:
        """What crosses in stacks."""
        return [value for value in self._crossing if not self.is_cheap(value)]

    @cached_property
    def again(self) -> list[ir.OpView]:
        """The ops of the first loop that the second one repeats."""
        waiting = [value for value in self._crossing if self.is_cheap(value)]
        waiting += [self.returned[v] for v in self.kept]
        found: set[ir.OpView] = set()
        while waiting:
            op = self._made_first.get(waiting.pop())
            if op is not None and op not in found:
                found.add(op)
                waiting += used_values(op)
        return [op for op in self.first_ops if op in found]

    @cached_property
    def kept(self) -> list[int]:
        """The variables of both loops: the counter, and constants of the loop that are read."""
        found = {self.counter, *condition_variables(self.op)}
        waiting = [value for value in self._crossing if self.is_cheap(value)]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            if value in self.arguments:
                found.add(self.arguments[value])
            elif value in self._made_first:
                more = [it for it in used_values(self._made_first[value]) if it not in seen]
                seen.update(more)
                waiting += more
        return sorted(found)

    def is_cheap(self, value: ir.Value) -> bool:
        """Whether a value depends on the trip's number and constants alone, and is computed again
        nearly for nothing."""
        if value not in self._cheap:
            self._cheap[value] = self._is_cheap(value)
        return self._cheap[value]

    def _is_cheap(self, value: ir.Value) -> bool:
        if value in self.arguments:
            v = self.arguments[value]
            return v == self.counter or self.returned[v] == value
        if value not in self._made_first:
            return value not in self._makers
        op = self._made_first[value]
        is_scalar = op.name in ELEMENTWISE and _rank(value) == 0
        return (op.name in _CHEAP or is_scalar) and all(map(self.is_cheap, op.operands))

    def sharding(self, value: ir.Value) -> Sharding | None:
        """That of a value in the body, if the loop has shardings."""
        if value in self.arguments:
            shardings = op_shardings(self.op)
            return None if shardings is None else shardings[self.arguments[value]]
        shardings = op_shardings(self._makers[value])
        return None if shardings is None else shardings[ir.OpResult(value).result_number]

    def first(self) -> ir.OpView:
        """The loop of what is needed, with a stack for each value that is stored."""
        order = sorted(self.variables)
        operands = [self.op.operands[v] for v in order]
        with ir.InsertionPoint(self.op), self.op.location:
            operands += [self._filled(value) for value in self.stored]
        loop, inside = self._loop(order, operands, self.stored)
        block = body(loop, 1)
        stacks = list(block.arguments)[len(order) :]
        with ir.InsertionPoint(block), self.op.location:
            _copy(self.first_ops, inside)
            written = [
                self._write(stack, inside[value], inside[self.block.arguments[self.counter]], value)
                for stack, value in zip(stacks, self.stored, strict=True)
            ]
            stablehlo.ReturnOp(
                [*(inside.get(self.returned[v], self.returned[v]) for v in order), *written]
            )
        for v, result in zip(order, loop.results, strict=False):
            self.op.results[v].replace_all_uses_with(result)
        return loop

    def second(self, first: ir.OpView) -> None:
        """The loop of the rest, after the first."""
        order = [*self.kept, *self.own]
        stacks = list(first.results)[len(self.variables) :]
        operands = [*(self.op.operands[v] for v in order), *stacks]
        loop, inside = self._loop(order, operands, self.stored)
        block = body(loop, 1)
        arguments = list(block.arguments)[len(order) :]
        with ir.InsertionPoint(block), self.op.location:
            for stack, value in zip(arguments, self.stored, strict=True):
                number = inside[self.block.arguments[self.counter]]
                inside[value] = self._read(stack, number, value)
            again = set(self.again)
            second = set(self.second_ops)
            _copy([op for op in self.ops if op in again or op in second], inside)
            stablehlo.ReturnOp(
                [*(inside.get(self.returned[v], self.returned[v]) for v in order), *arguments]
            )
        for v, result in zip(order, loop.results, strict=False):
            if v in self.own:
                self.op.results[v].replace_all_uses_with(result)

    def _loop(
        self, order: Sequence[int], operands: Sequence[ir.Value], stored: Sequence[ir.Value]
    ) -> tuple[ir.OpView, dict[ir.Value, ir.Value]]:
        """A loop without a body, before the old one; the old body's arguments -> the new one's."""
        types = [operand.type for operand in operands]
        loop = stablehlo.WhileOp(
            types, list(operands), loc=self.op.location, ip=ir.InsertionPoint(self.op)
        )
        locations = [self.op.location] * len(types)
        condition = loop.regions[0].blocks.append(*types, arg_locs=locations)
        block = loop.regions[1].blocks.append(*types, arg_locs=locations)
        old = body(self.op, 0)
        tested = {old.arguments[v]: condition.arguments[n] for n, v in enumerate(order)}
        with ir.InsertionPoint(condition):
            _copy(list(old.operations)[:-1], tested)
            with self.op.location:
                stablehlo.ReturnOp([tested.get(it, it) for it in terminator(old).operands])
        shardings = op_shardings(self.op)
        if shardings is not None:
            rows = (self._stack_sharding(value) for value in stored)
            set_op_shardings(
                loop, (*(shardings[v] for v in order), *(it for it in rows if it is not None))
            )
        return loop, {self.block.arguments[v]: block.arguments[n] for n, v in enumerate(order)}

    def _stack_sharding(self, value: ir.Value) -> Sharding | None:
        row = self.sharding(value)
        return (
            None
            if row is None
            else replace(
                row,
                dims=((), *row.dims),
                open_dims=frozenset(d + 1 for d in row.open_dims),
            )
        )

    def _stack_type(self, value: ir.Value) -> ir.RankedTensorType:
        row = ir.RankedTensorType(value.type)
        return ir.RankedTensorType.get([self.trips, *row.shape], row.element_type)

    def _row_type(self, value: ir.Value) -> ir.RankedTensorType:
        row = ir.RankedTensorType(value.type)
        return ir.RankedTensorType.get([1, *row.shape], row.element_type)

    def _filled(self, value: ir.Value) -> ir.Value:
        return self._sharded(filled(self._stack_type(value), 0), value)

    def _write(self, stack: ir.Value, row: ir.Value, number: ir.Value, value: ir.Value) -> ir.Value:
        shaped = self._sharded(stablehlo.reshape(self._row_type(value), row), value)
        starts = self._starts(number, value)
        return self._sharded(stablehlo.dynamic_update_slice(stack, shaped, starts), value)

    def _read(self, stack: ir.Value, number: ir.Value, value: ir.Value) -> ir.Value:
        sizes = list(self._row_type(value).shape)
        taken = stablehlo.dynamic_slice(stack, self._starts(number, value), sizes)
        row = stablehlo.ReshapeOp(value.type, self._sharded(taken, value))
        sharding = self.sharding(value)
        if sharding is not None:
            set_op_shardings(row, (sharding,))
        return row.result

    def _starts(self, number: ir.Value, value: ir.Value) -> list[ir.Value]:
        zero = filled(ir.RankedTensorType(number.type), 0)
        return [number, *[zero] * _rank(value)]

    def _sharded(self, made: ir.Value, value: ir.Value) -> ir.Value:
        """Gives an op that makes rows of a stored value its sharding."""
        sharding = self._stack_sharding(value)
        if sharding is not None:
            assert isinstance(made.owner, ir.OpView)
            set_op_shardings(made.owner, (sharding,))
        return made


def _copy(ops: Iterable[ir.OpView], inside: dict[ir.Value, ir.Value]) -> None:
    """Adds copies of ops at the insertion point; `inside` maps old values to those there."""
    for op in ops:
        clone = op.operation.clone().opview
        replace_operands(clone, inside)
        inside.update(zip(op.results, clone.results, strict=True))


def _rank(value: ir.Value) -> int:
    return ir.RankedTensorType(value.type).rank


def _is_used(value: ir.Value) -> bool:
    return any(True for _ in value.uses)
