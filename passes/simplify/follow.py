"""`alpa.follow`: the operand whose sharding a computationally trivial op takes.

Among the operands the first of these that differs decides:

1. no broadcast into new dimensions if another operand is at hand: a broadcast can be made in any
   layout for free, and the layout of `mean(x)` says nothing about the dimensions of `x - mean(x)`;
2. the deepest: most non-trivial ops on the way from an argument (of the innermost loop body);
3. the longest way, trivial ops counted too;
4. the largest tensor; the lowest number.

Not candidates: free values, which are computed from constants only or are broadcasts of a scalar,
a scalar beside tensors, and initial values of a reduction. An op without candidates carries no
mark: its result is free, any layout costs the same.
"""

from __future__ import annotations

from typing import NamedTuple

from alpa.dialects import ir, stablehlo
from alpa.dialects.attributes import FOLLOW, marker_of
from alpa.dialects.caches import cached
from alpa.dialects.records import i64
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.analysis.op_kinds import BROADCASTS, DATA_MOVEMENT, SOURCES, TRIVIAL
from alpa.passes.simplify.rewriter import programs

_LIGHT = DATA_MOVEMENT | {
    "sdy.sharding_constraint",
    "stablehlo.get_tuple_element",
    "stablehlo.tuple",
}


class _Value(NamedTuple):
    type: ir.Type
    rank: int
    depth: int = 0
    length: int = 0
    free: bool = False
    expanded: bool = False

    def is_before(self, other: _Value) -> bool:
        """Whether an op follows this operand rather than the other one, which it reads first."""
        ours = (not self.expanded, self.depth, self.length, type_bytes(self.type))
        return ours > (not other.expanded, other.depth, other.length, type_bytes(other.type))


class _Marker:
    def __init__(self) -> None:
        self.values: dict[ir.Value, _Value] = {}
        self.numbers: dict[int, ir.Attribute] = {}

    def mark(self, block: ir.Block) -> None:
        for argument in block.arguments:
            self.values[argument] = _Value(argument.type, _rank(argument.type))
        for op in block.operations:
            name = op.operation.name
            self._visit(op, name)
            for inner in programs(op, name):
                self.mark(inner)

    def _visit(self, op: ir.OpView, name: str) -> None:
        if name not in TRIVIAL and FOLLOW in op.attributes:
            del op.attributes[FOLLOW]
        results = list(op.results)
        if not results:
            return
        type_ = results[0].type
        rank = _rank(type_)
        if name in SOURCES:
            value = _Value(type_, rank, free=True)
        else:
            inputs = [self.values[operand] for operand in op.operands]
            if name in TRIVIAL:
                value = self._follow(op, name, type_, rank, inputs)
            elif _is_per_operand(op):
                for result, one in zip(results, inputs, strict=True):
                    self.values[result] = one._replace(length=one.length + 1)
                return
            else:
                light = name in _LIGHT
                value = _Value(
                    type_,
                    rank,
                    max([v.depth for v in inputs], default=0) + (not light),
                    max([v.length for v in inputs], default=0) + 1,
                    free=light and all(v.free for v in inputs),
                )
        self.values[results[0]] = value
        for result in results[1:]:
            self.values[result] = value._replace(type=result.type, rank=_rank(result.type))

    def _follow(
        self, op: ir.OpView, name: str, type_: ir.Type, rank: int, inputs: list[_Value]
    ) -> _Value:
        """Marks a trivial op whose (first) result has this type; what is known of that."""
        if name == "stablehlo.reduce":
            inputs = inputs[: len(inputs) // 2]
        depth = length = 0
        number, chosen = 0, None
        for i, value in enumerate(inputs):
            depth, length = max(depth, value.depth), max(length, value.length)
            if value.free or (rank and not value.rank):
                continue
            if chosen is None or value.is_before(chosen):
                number, chosen = i, value
        if chosen is None:
            if FOLLOW in op.attributes:
                del op.attributes[FOLLOW]
            return _Value(type_, rank, 0, length + 1, free=True)
        if number not in self.numbers:
            self.numbers[number] = i64(number)
        op.attributes[FOLLOW] = self.numbers[number]
        expanded = chosen.expanded or (name in BROADCASTS and _expands(name, chosen.type, type_))
        return _Value(type_, rank, depth, length + 1, expanded=expanded)


@cached
def _rank(type_: ir.Type) -> int:
    return type_.rank if isinstance(type_, ir.RankedTensorType) else 0


def mark_follow(block: ir.Block) -> None:
    """Puts `alpa.follow` on the trivial ops of a block and of its loops and branches."""
    _Marker().mark(block)


@cached
def _expands(name: str, source: ir.Type, target: ir.Type) -> bool:
    """Whether a broadcast makes dimensions that its operand lacks or has with size 1 only."""
    if name == "stablehlo.broadcast":
        return True
    return sorted(ir.RankedTensorType(source).shape) != sorted(ir.RankedTensorType(target).shape)


def _is_per_operand(op: ir.OpView) -> bool:
    """Whether each result is the operand of the same number, as barriers and markers give it."""
    if isinstance(op, stablehlo.OptimizationBarrierOp):
        return True
    return marker_of(op) is not None and len(op.operands) == len(op.results)
