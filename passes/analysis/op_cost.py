"""FLOPs and bytes of StableHLO ops, and trip counts of loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from alpa.dialects import body, ir, sdy, stablehlo, terminator
from alpa.dialects.attributes import CallCost
from alpa.passes.analysis.graph import elements, type_bytes
from alpa.passes.analysis.op_kinds import CONTRACTIONS, ELEMENTWISE_STABLEHLO, FREE

# Stands for an unknown trip count. Loops whose bound depends on data are rare, but cost more than
# one run of their body.
UNKNOWN_TRIP_COUNT = 8

# Ops whose operands have no more elements than the result.
_AS_ITS_RESULT = ELEMENTWISE_STABLEHLO - {"stablehlo.bitcast_convert"}

_READS_PART = {"stablehlo.gather", "stablehlo.dynamic_slice"}
_WRITES_PART = {"stablehlo.scatter", "stablehlo.dynamic_update_slice"}


def flops(op: ir.OpView) -> float:
    """Floating point operations of one execution, regions of loops times their trip count.

    Contractions count 2 per multiply-add, custom calls what their `alpa.cost` says; anything else
    counts one per element of its largest operand or result.
    """
    name = op.name
    if name in FREE:
        return 0.0
    if name in _AS_ITS_RESULT:
        return float(elements(op.results[0].type))
    if name in CONTRACTIONS:
        return 2.0 * elements(op.results[0].type) * _contracted(op)
    if (inner := _of_programs(op, flops)) is not None:
        return inner
    if isinstance(op, stablehlo.CustomCallOp) and (given := CallCost.read(op)) is not None:
        return given.flops
    if name in _READS_PART:
        return float(elements(op.results[0].type))
    if name in _WRITES_PART:
        return float(sum(elements(value.type) for value in _updates(op)))
    values = [*op.operands, *op.results]
    return float(max((elements(value.type) for value in values), default=0))


def memory_bytes(op: ir.OpView) -> float:
    """Bytes read and written by one execution, as if nothing were fused; of custom calls, those of
    their `alpa.cost`."""
    if op.name in FREE:
        return 0.0
    if (inner := _of_programs(op, memory_bytes)) is not None:
        return inner
    given = CallCost.read(op) if isinstance(op, stablehlo.CustomCallOp) else None
    if given is not None and given.bytes is not None:
        return given.bytes
    values = [*op.operands, *op.results]
    if op.name in _READS_PART:
        values = [*list(op.operands)[1:], *op.results, *op.results]
    elif op.name in _WRITES_PART:
        # Only the updated part is touched: XLA updates in place.
        values = [*list(op.operands)[len(op.results) :], *_updates(op)]
    return float(sum(type_bytes(value.type) for value in values))


def _of_programs(op: ir.OpView, cost: Callable[[ir.OpView], float]) -> float | None:
    """The cost of one execution of the programs in an op's regions; None if there are none."""
    if isinstance(op, stablehlo.WhileOp):
        return trip_count_or_default(op) * sum(map(cost, body(op, 1).operations))
    if isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
        return max(sum(map(cost, body(op, i).operations)) for i in range(len(op.regions)))
    if isinstance(op, sdy.ManualComputationOp):
        return manual_ways(op) * sum(map(cost, body(op).operations))
    return None


def _contracted(op: ir.OpView) -> float:
    """The number of products that a contraction sums for each element of its result."""
    left, right = (ir.RankedTensorType(value.type).shape for value in op.operands)
    if isinstance(op, stablehlo.DotGeneralOp):
        dims = stablehlo.DotDimensionNumbers(op.dot_dimension_numbers)
        return math.prod(left[d] for d in dims.lhs_contracting_dimensions)
    if isinstance(op, stablehlo.ConvolutionOp):
        dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
        return math.prod(right) / max(1, right[dims.kernel_output_feature_dimension])
    return left[-1]


def manual_ways(op: sdy.ManualComputationOp) -> int:
    """The number of parts of the operand or result that a manual computation cuts most finely."""
    block = body(op)
    pairs = [
        *zip(op.operands, block.arguments, strict=True),
        *zip(op.results, terminator(block).operands, strict=True),
    ]
    return max(
        (elements(one.type) // max(1, elements(part.type)) for one, part in pairs), default=1
    )


def _updates(op: ir.OpView) -> list[ir.Value]:
    """What a scatter or dynamic_update_slice writes into its first operands, one per result."""
    first = len(op.results) + (op.name == "stablehlo.scatter")
    return list(op.operands)[first : first + len(op.results)]


def trip_count_or_default(loop: stablehlo.WhileOp) -> int:
    """The number of trips of a counted loop; `UNKNOWN_TRIP_COUNT` for any other loop."""
    counter = loop_counter(loop)
    return UNKNOWN_TRIP_COUNT if counter is None else counter.trips


@dataclass(frozen=True)
class Counter:
    """The variable that counts a loop's trips: its number among the variables, and its values."""

    index: int
    values: range

    @property
    def trips(self) -> int:
        """The number of its values, for which `len` fails from 2^63 on."""
        return max(0, -((self.values.start - self.values.stop) // self.values.step))


def loop_counter(loop: stablehlo.WhileOp) -> Counter | None:
    """The counter of a loop `for i = a; i < b; i += c`; None for any other loop.

    The bound and the start must be constants, defined inside or outside the loop.
    """
    condition = terminator(body(loop, 0)).operands[0].owner
    if not isinstance(condition, stablehlo.CompareOp):
        return None
    direction = str(condition.comparison_direction)
    counter = condition.lhs
    if counter.owner != body(loop, 0) or "LT" not in direction:
        return None
    index = ir.BlockArgument(counter).arg_number
    limit, growth = loop_constant(condition.rhs, loop), loop_growths(loop, [index])[index]
    if limit is None or growth is None or growth[1] <= 0:
        return None
    return Counter(index, range(growth[0], limit, growth[1]))


def loop_growths(
    loop: stablehlo.WhileOp, variables: Iterable[int]
) -> dict[int, tuple[int, int] | None]:
    """Of a loop's variables, the initial value and the number that each trip adds to it; None
    unless both are constants."""
    block, end = body(loop, 1), terminator(body(loop, 1))

    def growth(variable: int) -> tuple[int, int] | None:
        argument, added = block.arguments[variable], end.operands[variable].owner
        if not isinstance(added, stablehlo.AddOp) or argument not in (added.lhs, added.rhs):
            return None
        start = loop_constant(loop.operands[variable], loop)
        step = loop_constant(added.rhs if added.lhs == argument else added.lhs, loop)
        return None if start is None or step is None else (start, step)

    return {variable: growth(variable) for variable in variables}


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
    return ir.IntegerAttr(attr.get_splat_value()).value
