"""Results of ops whose shardings a question fixes: `alpa.forced_result` on the op and on @main.

Only strategies that give the result that sharding are left, so the problem has no assignment that
it lacks without the attribute. A sharding constraint would add a node that several readers share.
"""

from __future__ import annotations

from alpa.dialects import func, ir
from alpa.dialects.attributes import FORCED_RESULT
from alpa.dialects.sharding import Sharding
from alpa.passes.base import PassError
from alpa.passes.sharding.layouts import layout_of
from alpa.passes.sharding.shard_graph import ShardGraph


def write_forced_result(function: func.FuncOp, op: ir.OpView, sharding: Sharding) -> None:
    """Fixes the sharding of the first result of an op in @main."""
    op.attributes[FORCED_RESULT] = sharding.to_attr()
    function.attributes[FORCED_RESULT] = ir.UnitAttr.get()


def force_results(function: func.FuncOp, graph: ShardGraph) -> None:
    """Forbids the other strategies of ops of @main whose results are forced.

    Raises:
        PassError: no strategy of such an op gives the sharding.
    """
    if FORCED_RESULT not in function.attributes:
        return
    for one in graph.ops:
        attr = one.op.view.attributes.get(FORCED_RESULT)
        if attr is None:
            continue
        layout = layout_of(one.op.view, Sharding.from_attr(attr), graph.mesh)
        strategies = one.space.strategies
        if one.space.sums is not None:
            strategies = tuple(one.space.sums.ways.values())
        if all(strategy.results[0] != layout for strategy in strategies):
            raise PassError(
                one.op.view,
                f"no strategy of {one.op.view.operation.name} gives its result this sharding",
            )
        graph.allow_variants(one, lambda strategy, layout=layout: strategy.results[0] == layout)
