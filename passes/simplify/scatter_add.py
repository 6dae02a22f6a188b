"""Adds what is scattered into an argument to zeros first, and then to the argument.

Several micro-batches can add up what each of them counts, and not what each of them adds to the
same counts.

**Before**
```mlir
%new = stablehlo.scatter(%counts, %classes, %ones) … add …
```
**After**
```mlir
%0 = stablehlo.scatter(%zero, %classes, %ones) … add …
%new = stablehlo.add %counts, %0
```
"""

from __future__ import annotations

from alpa.dialects import filled, ir, stablehlo
from alpa.dialects.attributes import WHOLE


def scatter_apart(block: ir.Block) -> None:
    """Rewrites the scatters of a block that add to one of its arguments."""
    for op in list(block.operations):
        if not isinstance(op, stablehlo.ScatterOp) or len(op.results) != 1 or not _adds(op):
            continue
        if WHOLE in op.attributes:
            continue  # what grows with the batch counts nothing
        given = op.operands[0]
        if not isinstance(given.owner, ir.Block):
            continue
        with op.location:
            with ir.InsertionPoint(op):
                op.operands[0] = filled(ir.RankedTensorType(given.type), 0.0)
            with ir.InsertionPoint.after(op):
                total = stablehlo.AddOp(given, op.results[0])
        op.results[0].replace_all_uses_except(total.result, total.operation)


def _adds(op: stablehlo.ScatterOp) -> bool:
    """Whether what is written is added to what is there."""
    block = op.regions[0].blocks[0]
    inner = list(block.operations)
    return (
        len(inner) == 2
        and isinstance(inner[0], stablehlo.AddOp)
        and {*inner[0].operands} == {*block.arguments}
    )
