"""The live ranges of a block's values, for any order of its ops.

A visitor advances `now` from op to op. It says of each result whether it is written to memory. A
result that is not written is a view of other values, or is recomputed from them where it is used;
its readers read these values instead. A written value lives until its last read, also through
others.

Loops work in place. A loop's result is its variable, which takes the place of the operand that it
starts as, unless that is read later. The next value of a variable is written over it, if nothing
reads the variable afterwards; an update of a part of it always is. What a loop only reads is not
copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from alpa.dialects import body, ir, stablehlo, terminator

UPDATES_IN_PLACE = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


@dataclass(kw_only=True)
class Lives:
    """The lives of values as half-open intervals of time, `made` to `until`."""

    now: int = 0
    made: dict[ir.Value, int] = field(default_factory=dict)
    """when a value is written"""
    until: dict[ir.Value, int] = field(default_factory=dict)
    """the time after which no op reads a value, directly or through values that are not written"""
    base: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)
    """the values that are read instead of one that is not written"""
    fused: set[ir.Value] = field(default_factory=set)
    """the values that are computed where they are read"""
    _started: dict[ir.Value, ir.Value] = field(default_factory=dict)
    """the operands of what has started and not ended, by its results"""
    _touched: list[tuple[int, Iterable[ir.Value]]] = field(default_factory=list)
    """what was written or read when"""

    def write(self, value: ir.Value, start: int) -> None:
        """A value is written from `start` on: now, or by what follows."""
        self.made[value] = start
        self.until[value] = start + 1
        self._touched.append((self.now, (value,)))

    def see_through(
        self, value: ir.Value, base: Iterable[ir.Value], *, fused: bool = False
    ) -> None:
        """A value is not written: reading it reads `base`, of which it is a view unless `fused`."""
        self.base[value] = tuple(base)
        if fused:
            self.fused.add(value)
        self.until[value] = self.now + 1

    def end_with(self, result: ir.Value, operand: ir.Value) -> None:
        """What starts now ends when its result is first read; its operand lives until then."""
        self._started[result] = operand

    def read(self, values: Iterable[ir.Value]) -> None:
        """Values, and those that are read instead of them, live until now."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                self.until[value] = self.now + 1
                waiting += self.base.get(value, ())
                if value in self._started:
                    waiting.append(self._started.pop(value))
        self._touched.append((self.now, seen))

    def sources(self, values: Iterable[ir.Value]) -> set[ir.Value]:
        """The values that are read instead of these."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                waiting += self.base.get(value, ())
        return {value for value in seen if value not in self.base}

    def enter_loop(self, op: stablehlo.WhileOp, write: Callable[[ir.Value], None]) -> None:
        """Reads a loop's operands, writes the variables that change, and makes the rest views.

        What a loop only reads is written if it is not in memory: loops have no fused operands.
        """
        self.read(op.operands)
        block = body(op, 1)
        # A block finds its end by going through all of its ops.
        nexts = zip(op.operands, op.results, terminator(block).operands, strict=True)
        for number, (operand, result, value) in enumerate(nexts):
            is_constant = value == block.arguments[number]
            if is_constant and not self._is_recomputed(operand):
                self.see_through(result, [operand])
            else:
                write(result)
            for region in range(len(op.regions)):
                self.see_through(body(op, region).arguments[number], [result])

    def _is_recomputed(self, value: ir.Value) -> bool:
        """Whether a value, or what it is a view of, is computed where it is read; constants are
        not computed."""
        while value not in self.fused and self.base.get(value):
            value = self.base[value][0]
        return value in self.fused and not isinstance(value.owner, stablehlo.ConstantOp)

    def next_values(
        self, op: stablehlo.WhileOp, overwrites: Callable[[ir.Value], int]
    ) -> Iterator[tuple[ir.Value, ir.Value]]:
        """The values of a loop's body that are written over a variable, and the loop's results.

        `overwrites` says from which time on the op that makes a value may write over an operand.
        """
        block = body(op, 1)
        ends = zip(terminator(block).operands, block.arguments, op.results, strict=True)
        for value, variable, result in ends:
            inside = not isinstance(value.owner, ir.Block) and value.owner.operation.block == block
            if inside and value in self.made and overwrites(value) >= self.until[variable]:
                yield value, result

    def keep(self, *, made_before: int, read_after: int) -> None:
        """Values made before a loop that it reads live until its end, which is now."""
        during = set[ir.Value]()
        for when, values in reversed(self._touched):
            if when + 1 < read_after:  # What was written then lives for two steps at most.
                break
            during.update(values)
        kept = [
            value
            for value in during
            if self.made.get(value, made_before) < made_before and self.until[value] > read_after
        ]
        self.until.update(dict.fromkeys(kept, self.now + 1))
        self._touched.append((self.now, kept))


def updates_variable(op: ir.OpView) -> bool:
    """Whether an op writes a part of a loop's variable, whose next value it makes with others."""
    if not _updates(op):
        return False
    variable, value, block = op.operands[0], op.results[0], op.operation.block
    while not isinstance(variable.owner, ir.Block) and _updates(variable.owner.opview):
        variable = variable.owner.operands[0]
    if variable.owner != block or not isinstance(block.owner.opview, stablehlo.WhileOp):
        return False
    while len(uses := list(value.uses)) == 1:
        reader, number = uses[0].owner, uses[0].operand_number
        if reader == terminator(block):
            return number == ir.BlockArgument(variable).arg_number
        if number != 0 or not _updates(reader.opview):
            return False
        value = reader.results[0]
    return False


def _updates(op: ir.OpView) -> bool:
    return op.operation.name in UPDATES_IN_PLACE and len(op.results) == 1


def in_place_of(value: ir.Value, is_view: Callable[[ir.OpView], bool]) -> Iterator[ir.Value]:
    """The values that are written where one has its place: itself, and what it is made of by views,
    barriers, and loops that alone read what they start as."""
    yield value
    while not isinstance(value.owner, ir.Block):
        op = value.owner.opview
        if is_view(op):
            value = op.operands[0]
        elif isinstance(op, stablehlo.OptimizationBarrierOp):
            value = op.operands[ir.OpResult(value).result_number]
        elif isinstance(op, stablehlo.WhileOp):
            value = op.operands[ir.OpResult(value).result_number]
            if len(list(value.uses)) > 1:
                return
        else:
            return
        yield value
