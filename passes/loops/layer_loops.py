"""Recognises loops over layers: counted loops that take one row of stacked tensors per trip.

`jax.lax.scan` over stacked parameters makes two of them. The forward loop reads row i of the
parameters and writes row i of the residuals; the backward loop runs through the rows from the last
one, reads both and writes the rows of the gradients:

    %r:3 = stablehlo.while(%i = 0, %h = %x, %w = %weights, %s = %zeros) ... i < 8 ... {
      %0 = dynamic_slice %w, %i, ... sizes = [1, ...]       // reads the stack %w
      %1 = dynamic_update_slice %s, %update, %i, ...        // writes the stack %s
      return %i + 1, %next, %w, %1 }

Which row a trip takes is found by evaluating the index for every trip, so it does not matter how
it is written (`i`, `n - 1 - i`, `select(i < 0, i + n, i)`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.passes.analysis.op_cost import Counter, loop_constant, loop_counter, loop_growths


@dataclass(frozen=True)
class LayerLoop:
    """A counted loop with stacks. Variables are numbered as the loop's operands.

    `counts` are the variables that grow by a constant per trip, the counter among them: what they
    are at each trip, and after the last.
    `stacks` gives the dimension of each variable that is a stack: trip t takes row t of it, or the
    t-th from the end where the loop runs `backwards`. `accesses` are the results of the ops in the
    body that read and write rows.
    """

    op: stablehlo.WhileOp
    counter: Counter
    counts: dict[int, range]
    stacks: dict[int, int]
    accesses: frozenset[ir.Value]
    backwards: bool

    @property
    def trips(self) -> int:
        return self.counter.trips

    def first_trip(self, start: int, stop: int) -> int:
        """The first of the trips that take the rows from `start` to `stop`."""
        return self.trips - stop if self.backwards else start


def layer_loop(op: stablehlo.WhileOp) -> LayerLoop | str:
    """The loop as one over layers, or why it is none."""
    counter = loop_counter(op)
    if counter is None:
        return "its trip count is not a constant that can be read off"
    if counter.values.start != 0 or counter.values.step != 1:
        return f"it counts from {counter.values.start} in steps of {counter.values.step}"
    if counter.trips < 2:
        return f"its trip count is {counter.trips}"
    counts = _counts(op, counter.trips)
    found = list(_stacks(op, counts, counter.trips))
    if not found:
        return "no tensor is read or written one row per trip"
    backwards = found[0].backwards
    stacks = [stack for stack in found if stack.backwards == backwards]
    return LayerLoop(
        op=op,
        counter=counter,
        counts=counts,
        stacks={stack.variable: stack.dim for stack in stacks},
        accesses=frozenset(value for stack in stacks for value in stack.accesses),
        backwards=backwards,
    )


@dataclass(frozen=True)
class _Stack:
    variable: int
    dim: int
    backwards: bool
    accesses: tuple[ir.Value, ...]


def _counts(op: stablehlo.WhileOp, trips: int) -> dict[int, range]:
    """What variables that grow by a constant per trip are at each trip, and after the last."""
    growths = loop_growths(op, range(len(op.operands)))
    return {
        variable: range(growth[0], growth[0] + (trips + 1) * growth[1], growth[1])
        for variable, growth in growths.items()
        if growth is not None and growth[1]
    }


def _stacks(op: stablehlo.WhileOp, counts: dict[int, range], trips: int) -> Iterator[_Stack]:
    block, end = body(op, 1), terminator(body(op, 1))
    for variable, returned in enumerate(end.operands):
        argument = block.arguments[variable]
        updated = returned.owner
        readers = [use.owner for use in argument.uses if use.owner != end]
        written = isinstance(updated, stablehlo.DynamicUpdateSliceOp)
        if written:
            if updated.operand != argument or len(list(returned.uses)) != 1:
                continue
        elif returned != argument:
            continue
        if not all(len(access.results) for access in readers):
            continue  # what a branch inside of the loop returns as it is
        accesses = {access.results[0]: access for access in readers}
        if written:
            accesses[returned] = updated
        rows = {_rows(access, argument, op, counts, trips) for access in accesses.values()}
        if len(rows) == 1 and (row := rows.pop()) is not None:
            yield _Stack(variable, *row, tuple(accesses))


def _rows(
    access: ir.OpView,
    stack: ir.Value,
    loop: stablehlo.WhileOp,
    counts: dict[int, range],
    trips: int,
) -> tuple[int, bool] | None:
    """The dimension of which an op takes one row per trip, and whether from the last one on."""
    if access.operation.block != body(loop, 1) or access.operands[0] != stack:
        return None
    if isinstance(access, stablehlo.DynamicSliceOp):
        part, starts = access.results[0], list(access.operands)[1:]
    elif isinstance(access, stablehlo.DynamicUpdateSliceOp) and access.operands[1] != stack:
        part, starts = access.operands[1], list(access.operands)[2:]
    else:
        return None
    sizes = ir.RankedTensorType(stack.type).shape
    taken = ir.RankedTensorType(part.type).shape
    partial = [d for d, (size, take) in enumerate(zip(sizes, taken, strict=True)) if size != take]
    if len(partial) != 1 or taken[partial[0]] != 1 or sizes[partial[0]] != trips:
        return None
    rows = _evaluate(starts[partial[0]], loop, counts)
    if rows is None:
        return None
    taken_rows, every = np.broadcast_to(rows.clip(0, trips - 1), trips), np.arange(trips)
    backwards = bool((taken_rows == every[::-1]).all())
    return (partial[0], backwards) if backwards or (taken_rows == every).all() else None


_COMPUTED: dict[str, Callable[..., Any]] = {
    "stablehlo.add": np.add,
    "stablehlo.clamp": lambda low, value, high: np.clip(value, low, high),
    "stablehlo.convert": np.positive,
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.negate": np.negative,
    "stablehlo.select": np.where,
    "stablehlo.subtract": np.subtract,
}


def _evaluate(
    value: ir.Value, loop: stablehlo.WhileOp, counts: dict[int, range]
) -> np.ndarray | None:
    """A scalar integer of the loop's body at each trip, or one number for all trips; None where
    counting variables are not all that it depends on, or it does not fit its type."""
    owner = value.owner
    if isinstance(owner, ir.Block) and owner == body(loop, 1):
        variable = ir.BlockArgument(value).arg_number
        if variable in counts:
            return np.array(counts[variable][:-1])
    if isinstance(owner, ir.Block | stablehlo.ConstantOp):
        number = loop_constant(value, loop)
        return None if number is None else np.array(number)
    compute = _COMPUTED.get(owner.name)
    if isinstance(owner, stablehlo.CompareOp):
        direction = stablehlo.ComparisonDirectionAttr(owner.comparison_direction).value
        compute = getattr(operator, direction.lower())
    element = ir.RankedTensorType(value.type).element_type
    if compute is None or not isinstance(element, ir.IntegerType):
        return None
    operands = [_evaluate(operand, loop, counts) for operand in owner.operands]
    if any(operand is None for operand in operands):
        return None
    result = np.asarray(compute(*operands), dtype=np.int64)  # truth values, too
    lowest = 0 if element.is_unsigned or element.width == 1 else -(1 << (element.width - 1))
    fits = lowest <= result.min() and result.max() < lowest + (1 << element.width)
    return result if fits else None
