"""FLOPs and bytes of StableHLO ops, and trip counts of loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from alpa.dialects import body, ir, sdy, stablehlo, terminator
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.analysis.op_kinds import ELEMENTWISE_STABLEHLO

# Executed instead of an unknown trip count: a loop whose bound is data is rare, and it must
# weigh more than its body alone.
UNKNOWN_TRIP_COUNT = 8

CONTRACTIONS = frozenset(f"stablehlo.{name}" for name in ("convolution", "dot", "dot_general"))

# Ops that move data or make it and compute nothing.
_FREE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast_in_dim",
        "constant",
        "copy",
        "get_tuple_element",
        "iota",
        "optimization_barrier",
        "reshape",
        "return",
        "tuple",
    )
)

# Ops of whose operands none has more elements than the result.
_AS_ITS_RESULT = ELEMENTWISE_STABLEHLO - {"stablehlo.bitcast_convert"}


def flops(op: ir.OpView) -> float:
    """Floating point operations of one execution, regions of loops times their trip count.

    Contractions count 2 per multiply-add; anything else counts one per element of its largest
    operand or result.
    """
    return _flops(op)


def memory_bytes(op: ir.OpView) -> float:
    """Bytes read and written by one execution, as if nothing were fused."""
    if op.name in _FREE:
        return 0.0
    if isinstance(op, stablehlo.WhileOp):
        inner = sum(memory_bytes(o) for o in body(op, 1).operations)
        return trip_count_or_default(op) * inner
    if isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
        return max(
            sum(memory_bytes(o) for o in body(op, i).operations) for i in range(len(op.regions))
        )
    if isinstance(op, sdy.ManualComputationOp):
        return manual_ways(op) * sum(memory_bytes(o) for o in body(op).operations)
    values = [*op.operands, *op.results]
    if op.name in ("stablehlo.gather", "stablehlo.dynamic_slice"):
        values = [*list(op.operands)[1:], *op.results, *op.results]
    elif op.name in ("stablehlo.scatter", "stablehlo.dynamic_update_slice"):
        # Only the updated part is touched: XLA updates in place.
        values = [*list(op.operands)[len(op.results) :], *_updates(op)]
    return float(sum(type_bytes(value.type) for value in values))


def _flops(op: ir.OpView) -> float:
    name = op.name
    if name in _FREE:
        return 0.0
    if name in _AS_ITS_RESULT:
        return float(_elements(op.results[0]))
    if isinstance(op, stablehlo.DotGeneralOp):
        lhs = ir.RankedTensorType(op.lhs.type).shape
        dims = stablehlo.DotDimensionNumbers(op.dot_dimension_numbers)
        contracted = math.prod(lhs[d] for d in dims.lhs_contracting_dimensions)
        return 2.0 * _elements(op.results[0]) * contracted
    if name == "stablehlo.dot":
        lhs = ir.RankedTensorType(op.operands[0].type).shape
        return 2.0 * _elements(op.results[0]) * lhs[-1]
    if isinstance(op, stablehlo.ConvolutionOp):
        kernel = ir.RankedTensorType(op.rhs.type).shape
        dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
        outputs = kernel[dims.kernel_output_feature_dimension]
        return 2.0 * _elements(op.results[0]) * math.prod(kernel) / max(1, outputs)
    if isinstance(op, stablehlo.WhileOp):
        inner = sum(_flops(o) for o in body(op, 1).operations)
        return trip_count_or_default(op) * inner
    if isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
        return max(sum(_flops(o) for o in body(op, i).operations) for i in range(len(op.regions)))
    if isinstance(op, sdy.ManualComputationOp):
        return manual_ways(op) * sum(_flops(o) for o in body(op).operations)
    if name in ("stablehlo.gather", "stablehlo.dynamic_slice"):
        return float(_elements(op.results[0]))
    if name in ("stablehlo.scatter", "stablehlo.dynamic_update_slice"):
        return float(sum(_elements(value) for value in _updates(op)))
    values = [*op.operands, *op.results]
    return float(max((_elements(value) for value in values), default=0))


def manual_ways(op: sdy.ManualComputationOp) -> int:
    """Into how many parts a manual computation cuts its most finely cut operand or result."""
    block = body(op)
    pairs = [
        *zip(op.operands, block.arguments, strict=True),
        *zip(op.results, terminator(block).operands, strict=True),
    ]
    return max((_elements(one) // max(1, _elements(part)) for one, part in pairs), default=1)


def _updates(op: ir.OpView) -> list[ir.Value]:
    """What a scatter or dynamic_update_slice writes into its first operands, one per result."""
    first = len(op.results) + (op.name == "stablehlo.scatter")
    return list(op.operands)[first : first + len(op.results)]


def _elements(value: ir.Value) -> int:
    return _type_elements(value.type)


@lru_cache(maxsize=4096)
def _type_elements(type_: ir.Type) -> int:
    return math.prod(type_.shape) if isinstance(type_, ir.RankedTensorType) else 0


def trip_count_or_default(loop: stablehlo.WhileOp) -> int:
    """The loop's trip count, `UNKNOWN_TRIP_COUNT` where it cannot be read off."""
    count = trip_count(loop)
    return UNKNOWN_TRIP_COUNT if count is None else count


@dataclass(frozen=True)
class Counter:
    """What counts the trips of a loop: its number among the loop's variables, and its values."""

    index: int
    values: range


def trip_count(loop: stablehlo.WhileOp) -> int | None:
    """How often a counted loop runs; None for any other loop."""
    counter = loop_counter(loop)
    return None if counter is None else len(counter.values)


def loop_counter(loop: stablehlo.WhileOp) -> Counter | None:
    """The counter of a loop `for i = a; i < b; i += c`; None for any other loop.

    The bound and the start must be constants, defined inside or outside the loop.
    """
    condition = terminator(body(loop, 0)).operands[0].owner
    if not isinstance(condition, stablehlo.CompareOp):
        return None
    direction = str(condition.comparison_direction)
    counter = condition.lhs
    if not isinstance(counter.owner, ir.Block) or "LT" not in direction:
        return None
    index = ir.BlockArgument(counter).arg_number
    limit = loop_constant(condition.rhs, loop)
    start = loop_constant(loop.operands[index], loop)
    step_op = terminator(body(loop, 1)).operands[index].owner
    if limit is None or start is None or not isinstance(step_op, stablehlo.AddOp):
        return None
    if body(loop, 1).arguments[index] not in list(step_op.operands):
        return None
    step = loop_constant(step_op.rhs, loop)
    if step is None:
        step = loop_constant(step_op.lhs, loop)
    if step is None or step <= 0:
        return None
    return Counter(index, range(start, limit, step))


def loop_constant(value: ir.Value, loop: stablehlo.WhileOp) -> int | None:
    """An integer scalar constant, followed through a loop variable that never changes."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        if owner.owner != loop:
            return None
        index = ir.BlockArgument(value).arg_number
        carried = terminator(body(loop, 1)).operands[index]
        if carried != body(loop, 1).arguments[index]:
            return None
        return loop_constant(loop.operands[index], loop)
    if not isinstance(owner, stablehlo.ConstantOp) or ir.RankedTensorType(value.type).rank > 0:
        return None
    attr = owner.value
    if not isinstance(attr, ir.DenseIntElementsAttr):
        return None
    return int(attr[0])
