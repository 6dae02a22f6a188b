"""Finds all tensors that stack the layers of a loop, through the ops before, between and after.

The parameters of `lax.scan` are stacked in a loop over layers, and so are their gradients, the
optimizer's moments and new values: from a loop's own stacks one walks through the ops that keep
the dimension (element by element, transpose, broadcast ...), forwards and backwards. Loops that
share a stack share its rows, so they are cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from alpa.dialects import ir
from alpa.passes.analysis.rows import same_rows
from alpa.passes.loops.layer_loops import LayerLoop


@dataclass
class Stack:
    """Tensors with the same rows, and the loops over these. `dims[value]` is the dimension."""

    rows: int
    dims: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    loops: list[LayerLoop] = field(default_factory=list[LayerLoop])


def find_stacks(loops: Sequence[LayerLoop]) -> list[Stack]:
    """The stacks of a program's loops, in the order of their first loops.

    A tensor that would be stacked along two dimensions is so along the one that is met first.
    """
    loop_of = {loop.op.results[0]: loop for loop in loops}
    stacks: list[Stack] = []
    seen: set[ir.Value] = set()
    for seed in loops:
        if any(seed in stack.loops for stack in stacks):
            continue
        stack = Stack(seed.trips, loops=[seed])
        stacks.append(stack)
        pending = list(_stacked(seed))
        while pending:
            value, dim = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            stack.dims[value] = dim
            for op in _neighbours(value):
                loop = loop_of.get(op.results[0]) if len(op.results) else None
                if loop is None:
                    groups = [group for group in same_rows(op) if (value, dim) in group]
                    pending += [it for group in groups for it in group]
                elif loop not in stack.loops and (value, dim) in list(_stacked(loop)):
                    stack.loops.append(loop)
                    pending += _stacked(loop)
    return stacks


def _neighbours(value: ir.Value) -> Iterator[ir.OpView]:
    """The op that makes a value, and those that read it."""
    if not isinstance(value.owner, ir.Block):
        yield value.owner.opview
    for use in value.uses:
        yield use.owner.operation.opview


def _stacked(loop: LayerLoop) -> Iterator[tuple[ir.Value, int]]:
    for variable, dim in loop.stacks.items():
        yield loop.op.operands[variable], dim
        yield loop.op.results[variable], dim
