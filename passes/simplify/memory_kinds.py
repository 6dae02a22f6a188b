"""Memory kinds: a plan keeps everything in the memory of devices."""

from __future__ import annotations

from collections.abc import Iterable

from alpa.dialects import body, func, ir
from alpa.dialects.attributes import call_target, take_from_signature
from alpa.dialects.records import entries, typed
from alpa.passes.analysis.graph import replace_op
from alpa.passes.base import Remark, errors_at, location_of

_KIND = "mhlo.memory_kind"
_FRONTEND = "mhlo.frontend_attributes"
_PLACEMENT = "annotate_device_placement"
_BUFFER = "_xla_buffer_placement"


def drop_memory_kinds(main: func.FuncOp, ops: Iterable[ir.OpView], remark: Remark) -> None:
    """Removes what a program says of memories; one remark where it asks for other than devices'.

    `ops` are those of the function that are no arithmetic.

    Raises:
        PassError: the name of a memory is no string.
    """
    asked: list[str] = []
    for number, kind in take_from_signature(main, "arg_attrs", _KIND).items():
        with errors_at(location_of(body(main).arguments[number].location, main)):
            asked.append(typed(f"{_KIND} of argument {number}", kind, ir.StringAttr).value)
    for number, kind in take_from_signature(main, "res_attrs", _KIND).items():
        with errors_at(main):
            asked.append(typed(f"{_KIND} of result {number}", kind, ir.StringAttr).value)
    for op in ops:
        if call_target(op) == _PLACEMENT:
            attrs = op.attributes.get(_FRONTEND)
            if attrs is not None:
                with errors_at(op):
                    given = entries(typed(_FRONTEND, attrs, ir.DictAttr))
                    if _BUFFER in given:
                        asked.append(typed(_BUFFER, given[_BUFFER], ir.StringAttr).value)
            replace_op(op, op.operands)
    elsewhere = [kind for kind in asked if kind != "device"]
    if elsewhere:
        kinds = ", ".join(sorted(set(elsewhere)))
        remark(
            main.location,
            f"ignored {len(elsewhere)} placement(s) in {kinds}: the plan keeps everything in the "
            "memory of the devices",
        )
