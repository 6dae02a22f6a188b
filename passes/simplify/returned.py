"""Gives a result a value of its own if it requests another sharding than the value it returns."""

from __future__ import annotations

from alpa.dialects import body, func, ir, sdy, terminator
from alpa.dialects.sharding import Sharding, narrower, signature_shardings
from alpa.dialects.symbols import lift_inlined_meshes, meshes_by_name


def separate_results(module: ir.Module, main: func.FuncOp) -> None:
    """Inserts constraints so that each returned value has one sharding.

    A stored value has one layout. If a result aliases an argument or an earlier result but requests
    a different sharding, it gets a constraint.
    """
    lift_inlined_meshes(module)
    meshes = meshes_by_name(module)
    given = signature_shardings(main, "arg_attrs")
    block, end = body(main), terminator(body(main))
    stored: dict[ir.Value, Sharding] = {block.arguments[n]: s for n, s in given.items()}
    for number, sharding in signature_shardings(main, "res_attrs").items():
        value, mesh = end.operands[number], meshes[sharding.mesh]
        old = stored.setdefault(value, sharding)
        both = narrower(old, sharding, mesh) if meshes[old.mesh] == mesh else None
        if both is not None:
            stored[value] = both
            continue
        with ir.InsertionPoint(end), end.location:
            constraint = sdy.ShardingConstraintOp(value, sharding.to_attr())
        end.operands[number] = constraint.result
