"""What ties a program to the process or the platform that it was lowered for: a plan runs
elsewhere, and on many devices at once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from alpa.dialects import body, func, ir, stablehlo
from alpa.dialects.attributes import call_target, signature_attrs
from alpa.dialects.records import typed
from alpa.passes.base import PassError, errors_at, location_of

# They hold an address, or a number in a table, of the process that lowered the program.
_PYTHON = re.compile(r"xla_((ffi_(partitioned_)?)|buffer_)?python_[a-z]+_callback|InspectSharding")
_GLOBAL = "jax.global_constant"


def refuse_host_calls(main: func.FuncOp, ops: Iterable[ir.OpView]) -> None:
    """Looks for callbacks, ordered effects (those of infeed, outfeed, send and receive, too) and
    for an argument that names the platform.

    `ops` are those of the function that are no arithmetic.

    Raises:
        PassError: there is one, or what an argument says of its platform is no string.
    """
    for op in ops:
        target = call_target(op)
        if target is not None and _PYTHON.fullmatch(target):
            raise PassError(
                op,
                f"@{target} is a callback into Python (jax.debug.print, jax.pure_callback, "
                "jax.debug.inspect_array_sharding), and the processes that run a plan do not have "
                "that Python function; remove the call",
            )
        _refuse_tokens(op.results, op)
    _refuse_tokens(body(main).arguments, main)
    _refuse_platforms(main)


def _refuse_tokens(values: Iterable[ir.Value], where: ir.OpView) -> None:
    for value in values:
        if stablehlo.TokenType.isinstance(value.type):
            raise PassError(
                where,
                "a token orders side effects, which several devices cannot keep in order; lower "
                "the program without ordered effects",
            )


def _refuse_platforms(main: func.FuncOp) -> None:
    arguments = body(main).arguments
    for number, attrs in enumerate(signature_attrs(main, "arg_attrs", len(arguments))):
        if _GLOBAL not in attrs:
            continue
        place = location_of(arguments[number].location, main)
        with errors_at(place):
            text = typed(f"{_GLOBAL} of argument {number}", attrs[_GLOBAL], ir.StringAttr).value
        if text == "_platform_index":
            raise PassError(
                place,
                f"argument {number} says for which of several platforms the program is to run; "
                "export it for one",
            )
