"""Which collectives a compiler may combine: those of one kind and group that do not wait for each
other.

XLA for GPUs joins them, in program order, until their results have `LIMIT` bytes. The search
prices each collective alone and does not know the others: it takes a share of a start
(`cost/collectives.py`) for those of update parts, and for those on what is made of one argument of
a fragment alone. Those between a program's layers wait for each other.
"""

from __future__ import annotations

from alpa.dialects import ir
from alpa.dialects.attributes import read_part
from alpa.passes.cost.collectives import LogicalMesh

COMBINED_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
LIMIT = 30 * 2**20
"""Bytes of the results of a combined collective (`xla_gpu_all_gather_combine_threshold_bytes` and
the like)."""


def combined_with(value: ir.Value, fragment: ir.OpView | None, mesh: LogicalMesh) -> int:
    """With how many others a collective on a value of a fragment is priced; 1 if it is alone.

    As many as the fragment has arguments, rounded to a power of two so that few tables of costs are
    made.
    """
    if not mesh.combines or fragment is None:
        return 1
    if read_part(fragment) != "update" and not _is_of_argument(value, fragment):
        return 1
    return 1 << max(0, len(fragment.operands).bit_length() - 1)


def _is_of_argument(value: ir.Value, fragment: ir.OpView) -> bool:
    """Whether a value is made of one argument of a fragment alone, by ops of one operand."""
    owner = value.owner
    while not isinstance(owner, ir.Block):
        operands = owner.operands
        if len(operands) != 1:
            return False
        owner = operands[0].owner
    return owner.owner == fragment
