"""The ops of a block with the values that they read and make, read through the bindings once.

Each step through the bindings costs a microsecond, and analyses of a plan's fragments ask the same
of tens of thousands of ops.
"""

from __future__ import annotations

from typing import NamedTuple

from alpa.dialects import ir


class Row(NamedTuple):
    """An op as it was read."""

    op: ir.OpView
    name: str
    operands: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]


def row_of(op: ir.OpView) -> Row:
    """Reads an op."""
    return Row(op, op.operation.name, tuple(op.operands), tuple(op.results))


def rows_of(block: ir.Block) -> list[Row]:
    """The ops of a block, its terminator among them, in order."""
    return list(map(row_of, block.operations))
