"""The ops of a block as plain Python, read through the bindings once.

Each step through the bindings costs a microsecond, and all parts of `ilp-shard-annotate` ask the
same things of tens of thousands of ops.
"""

from __future__ import annotations

from typing import NamedTuple

from alpa.dialects import ir
from alpa.dialects.attributes import FOLLOW, read_int
from alpa.passes.analysis.op_work import NOTHING, Work
from alpa.passes.cost.device import Device
from alpa.passes.sharding.op_seconds import block_works


class Op(NamedTuple):
    """An op with the values that it had when it was read."""

    view: ir.OpView
    name: str
    operands: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]
    follow: int | None
    """the operand whose sharding it takes over, where `alpa.follow` names one"""
    work: Work
    """of one execution"""

    @classmethod
    def of(cls, op: ir.OpView, work: Work = NOTHING) -> Op:
        name = op.operation.name
        return cls(op, name, tuple(op.operands), tuple(op.results), read_int(op, FOLLOW), work)


def read_ops(block: ir.Block, device: Device) -> list[Op]:
    """The ops of a block but its terminator."""
    ops = list(block.operations)[:-1]
    return [Op.of(*each) for each in zip(ops, block_works(block, device), strict=True)]
