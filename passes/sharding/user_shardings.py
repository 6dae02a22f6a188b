"""Shardings that the given program carries. Planning within them is not built yet: they are
taken out, with a remark, since they change where values live and never what they are."""

from __future__ import annotations

from alpa.dialects import body, func, ir, sdy, walk
from alpa.passes.base import Remark

_SHARDING = "sdy.sharding"


def drop_user_shardings(module: ir.Module, function: func.FuncOp, remark: Remark) -> None:
    """Removes `sdy.sharding` of arguments, results and ops, constraints, and the meshes."""
    arguments = _drop_from_interface(function)
    constraints = 0
    for op in list(walk(body(function))):
        if _SHARDING in op.attributes:
            del op.attributes[_SHARDING]
        if isinstance(op, sdy.ShardingConstraintOp):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
            constraints += 1
    for op in list(module.body.operations):
        if isinstance(op, sdy.MeshOp):
            op.erase()
    if arguments or constraints:
        remark(
            function.location,
            f"the program's own shardings ({arguments} on arguments and results, {constraints} "
            "constraints) are searched anew: planning within given shardings is not built yet",
        )


def _drop_from_interface(function: func.FuncOp) -> int:
    dropped = 0
    for name in ("arg_attrs", "res_attrs"):
        attr = function.attributes.get(name)
        if attr is None:
            continue
        kept: list[ir.DictAttr] = []
        for dictionary in ir.ArrayAttr(attr):
            items = {item.name: item.attr for item in ir.DictAttr(dictionary)}
            dropped += items.pop(_SHARDING, None) is not None
            kept.append(ir.DictAttr.get(items))
        function.attributes[name] = ir.ArrayAttr.get(kept)
    return dropped
