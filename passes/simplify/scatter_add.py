"""Rewrites a scatter-add into an argument as a scatter-add into zeros, followed by an addition.

The scatter into zeros is a sum over samples, which micro-batches can accumulate.

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
from alpa.passes.analysis.graph import Graph, combiner


def scatter_apart(graph: Graph) -> bool:
    """Rewrites the scatters of a block that add to one of its arguments; whether there are any."""
    found = False
    for op, name in zip(graph.ops, graph.names, strict=True):
        if name != "stablehlo.scatter" or combiner(op) != "stablehlo.add":
            continue
        if WHOLE in op.attributes:
            continue  # what grows with the batch counts nothing
        given = op.operands[0]
        if not isinstance(given.owner, ir.Block):
            continue
        found = True
        with op.location:
            with ir.InsertionPoint(op):
                op.operands[0] = filled(ir.RankedTensorType(given.type), 0.0)
            with ir.InsertionPoint.after(op):
                total = stablehlo.AddOp(given, op.results[0])
        op.results[0].replace_all_uses_except(total.result, total.operation)
    return found
