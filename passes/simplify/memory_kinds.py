"""Memory kinds: a plan keeps everything in the memory of devices."""

from __future__ import annotations

from alpa.dialects import body, func, ir, walk
from alpa.passes.base import Remark

_KIND = "mhlo.memory_kind"
_PLACEMENT = "annotate_device_placement"
_BUFFER = "_xla_buffer_placement"


def drop_memory_kinds(main: func.FuncOp, remark: Remark) -> None:
    """Removes what a program says of memories; one remark where it asks for other than devices'."""
    asked = [kind for name in ("arg_attrs", "res_attrs") for kind in _take(main, name)]
    for op in list(walk(body(main))):
        target = op.attributes.get("call_target_name")
        if target is not None and ir.StringAttr(target).value == _PLACEMENT:
            attrs = op.attributes.get("mhlo.frontend_attributes")
            if attrs is not None and _BUFFER in ir.DictAttr(attrs):
                asked.append(ir.StringAttr(ir.DictAttr(attrs)[_BUFFER]).value)
            op.results[0].replace_all_uses_with(op.operands[0])
            op.operation.erase()
    elsewhere = [kind for kind in asked if kind != "device"]
    if elsewhere:
        kinds = ", ".join(sorted(set(elsewhere)))
        remark(
            main.location,
            f"ignored {len(elsewhere)} placement(s) in {kinds}: the plan keeps everything in the "
            "memory of the devices",
        )


def _take(function: func.FuncOp, name: str) -> list[str]:
    """Removes the memory kinds of arguments or results and gives them."""
    if name not in function.attributes:
        return []
    found: list[str] = []
    kept: list[ir.DictAttr] = []
    for attrs in ir.ArrayAttr(function.attributes[name]):
        fields = {item.name: item.attr for item in ir.DictAttr(attrs)}
        kind = fields.pop(_KIND, None)
        if kind is not None:
            found.append(ir.StringAttr(kind).value)
        kept.append(ir.DictAttr.get(fields))
    function.attributes[name] = ir.ArrayAttr.get(kept)
    return found
