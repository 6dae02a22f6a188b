"""Memory kinds: a plan keeps everything in the memory of devices."""

from __future__ import annotations

from collections.abc import Iterable

from alpa.dialects import func, ir
from alpa.dialects.attributes import call_target, take_from_signature
from alpa.passes.analysis.graph import replace_op
from alpa.passes.base import Remark

_KIND = "mhlo.memory_kind"
_PLACEMENT = "annotate_device_placement"
_BUFFER = "_xla_buffer_placement"


def drop_memory_kinds(main: func.FuncOp, ops: Iterable[ir.OpView], remark: Remark) -> None:
    """Removes what a program says of memories; one remark where it asks for other than devices'.

    `ops` are those of the function that are no arithmetic.
    """
    asked = [
        ir.StringAttr(kind).value
        for name in ("arg_attrs", "res_attrs")
        for kind in take_from_signature(main, name, _KIND).values()
    ]
    for op in ops:
        if call_target(op) == _PLACEMENT:
            attrs = op.attributes.get("mhlo.frontend_attributes")
            if attrs is not None and _BUFFER in ir.DictAttr(attrs):
                asked.append(ir.StringAttr(ir.DictAttr(attrs)[_BUFFER]).value)
            replace_op(op, op.operands)
    elsewhere = [kind for kind in asked if kind != "device"]
    if elsewhere:
        kinds = ", ".join(sorted(set(elsewhere)))
        remark(
            main.location,
            f"ignored {len(elsewhere)} placement(s) in {kinds}: the plan keeps everything in the "
            "memory of the devices",
        )
