"""Which values a result depends on, through loops and barriers result by result.

A loop's result depends on those variables only that lead to it from trip to trip, and a barrier's
result on its own operand only. Every other op's results depend on all that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.graph import used_values


def leading_to(block: ir.Block, values: Iterable[ir.Value]) -> set[ir.Value]:
    """The values that some values of a block depend on, themselves included; also those from
    around the block."""
    found = set(values)
    for op in reversed(list(block.operations)[:-1]):
        wanted = {number for number, result in enumerate(op.results) if result in found}
        if wanted:
            found |= reads(op, wanted)
    return found


def ops_leading_to(block: ir.Block, values: Iterable[ir.Value]) -> list[ir.OpView]:
    """The ops of a block that some values need if each op runs as a whole, in order."""
    wanted, found = set(values), list[ir.OpView]()
    for op in reversed(list(block.operations)[:-1]):
        if any(result in wanted for result in op.results):
            found.append(op)
            wanted.update(used_values(op))
    return found[::-1]


def reads(op: ir.OpView, wanted: Collection[int]) -> set[ir.Value]:
    """The values around an op that some of its results depend on."""
    if isinstance(op, stablehlo.OptimizationBarrierOp):
        return {op.operands[number] for number in wanted}
    if not isinstance(op, stablehlo.WhileOp):
        return set(used_values(op))
    variables = variables_leading_to(op, wanted)
    returned = terminator(body(op, 1)).operands
    inner = leading_to(body(op, 1), (returned[v] for v in variables))
    inner |= _of_condition(op)
    outer = {value for value in inner if not _is_inside(value, op)}
    return outer | {op.operands[v] for v in variables}


def variables_leading_to(loop: stablehlo.WhileOp, wanted: Collection[int]) -> set[int]:
    """The variables of a loop that some of them depend on over its trips, with those that decide
    how many there are."""
    block = body(loop, 1)
    returned, arguments = terminator(block).operands, list(block.arguments)
    found: set[int] = set()
    waiting = {*wanted, *condition_variables(loop)}
    while waiting - found:
        found |= waiting
        inner = leading_to(block, (returned[v] for v in found))
        waiting = {v for v, argument in enumerate(arguments) if argument in inner}
    return found


def condition_variables(loop: stablehlo.WhileOp) -> set[int]:
    """The variables that a loop's condition reads."""
    read = _of_condition(loop)
    return {v for v, argument in enumerate(body(loop, 0).arguments) if argument in read}


def _of_condition(loop: stablehlo.WhileOp) -> set[ir.Value]:
    condition = body(loop, 0)
    return leading_to(condition, terminator(condition).operands)


def _is_inside(value: ir.Value, op: ir.OpView) -> bool:
    """Whether a value is made in one of an op's regions."""
    owner = value.owner
    around = owner.owner if isinstance(owner, ir.Block) else owner.operation.parent
    while around is not None:
        if around.operation == op.operation:
            return True
        around = around.operation.parent
    return False
