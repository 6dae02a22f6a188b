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
from alpa.passes.analysis.graph import shape, type_bytes
from alpa.passes.analysis.op_kinds import DATA_MOVEMENT, SOURCES, TRIVIAL
from alpa.passes.simplify.rewriter import programs

_LIGHT = DATA_MOVEMENT | {
    "sdy.sharding_constraint",
    "stablehlo.get_tuple_element",
    "stablehlo.tuple",
}


class _Value(NamedTuple):
    type: ir.Type
    depth: int = 0
    length: int = 0
    free: bool = False
    expanded: bool = False


class _Marker:
    def __init__(self) -> None:
        self.values: dict[ir.Value, _Value] = {}

    def mark(self, block: ir.Block) -> None:
        for argument in block.arguments:
            self.values[argument] = _Value(argument.type)
        for op in block.operations:
            self._visit(op)
            for inner in programs(op):
                self.mark(inner)

    def _visit(self, op: ir.OpView) -> None:
        name = op.operation.name
        if name not in TRIVIAL and FOLLOW in op.attributes:
            del op.attributes[FOLLOW]
        results = list(op.results)
        if not results:
            return
        if name in SOURCES:
            self.values.update((result, _Value(result.type, free=True)) for result in results)
            return
        inputs = [self.values[operand] for operand in op.operands]
        if name in TRIVIAL:
            value = self._follow(op, results[0].type, inputs)
        elif _is_per_operand(op):
            for result, one in zip(results, inputs, strict=True):
                self.values[result] = one._replace(length=one.length + 1)
            return
        else:
            light = name in _LIGHT
            value = _Value(
                results[0].type,
                max([v.depth for v in inputs], default=0) + (not light),
                max([v.length for v in inputs], default=0) + 1,
                free=light and all(v.free for v in inputs),
            )
        self.values[results[0]] = value
        for result in results[1:]:
            self.values[result] = value._replace(type=result.type)

    def _follow(self, op: ir.OpView, type_: ir.Type, inputs: list[_Value]) -> _Value:
        """Marks a trivial op whose (first) result has this type; what is known of that."""
        if isinstance(op, stablehlo.ReduceOp):
            inputs = inputs[: len(inputs) // 2]
        rank = _rank(type_)
        candidates = [
            i
            for i, value in enumerate(inputs)
            if not value.free and (rank == 0 or _rank(value.type) > 0)
        ]
        length = max([v.length for v in inputs]) + 1
        if not candidates:
            if FOLLOW in op.attributes:
                del op.attributes[FOLLOW]
            return _Value(type_, 0, length, free=True)

        def rank_of(i: int) -> tuple[bool, int, int, int, int]:
            value = inputs[i]
            return not value.expanded, value.depth, value.length, type_bytes(value.type), -i

        number = max(candidates, key=rank_of)
        op.attributes[FOLLOW] = i64(number)
        expanded = inputs[number].expanded or _expands(op, number)
        return _Value(type_, max([v.depth for v in inputs]), length, expanded=expanded)


@cached
def _rank(type_: ir.Type) -> int:
    return type_.rank if isinstance(type_, ir.RankedTensorType) else 0


def mark_follow(block: ir.Block) -> None:
    """Puts `alpa.follow` on the trivial ops of a block and of its loops and branches."""
    _Marker().mark(block)


def _expands(op: ir.OpView, number: int) -> bool:
    """Whether a broadcast makes dimensions that its operand lacks or has with size 1 only."""
    if not isinstance(op, stablehlo.BroadcastInDimOp):
        return op.operation.name == "stablehlo.broadcast"
    return sorted(shape(op.operands[number])) != sorted(shape(op.results[0]))


def _is_per_operand(op: ir.OpView) -> bool:
    """Whether each result is the operand of the same number, as barriers and markers give it."""
    if isinstance(op, stablehlo.OptimizationBarrierOp):
        return True
    return marker_of(op) is not None and len(op.operands) == len(op.results)
