"""Ops of MHLO in MLIR text, replaced by those of CHLO and StableHLO before it is parsed.

XLA's exporters leave a few, and jaxlib does not have the dialect. An op that is not replaced is an
error of MLIR's reader, at its place and with its name.
"""

from __future__ import annotations

import re

UNARY = ("acos", "acosh", "asin", "asinh", "atanh", "cosh", "erf", "sinh", "tan")
"""Ops that CHLO has by the same name."""

_UNARY = b"(?P<name>%s)" % "|".join(UNARY).encode()
# Attributes of an op, such as shardings, begin with `mhlo.`, too, but are no first word.
_FIRST = rb"(?P<begin>(?:=|^)[ \t]*)mhlo\."
_OPERAND_AND_TYPE = (
    rb"(?P<operand>[ \t]+%[\w#$.-]+(?:[ \t]*\{[^\n]*\})?)"
    rb"[ \t]*:[ \t]*(?P<type>\S+)(?=[ \t]*(?:$|//|loc\())"
)
_TOP_K = (
    rb"topk\((?P<rest>[^,()\n]+,[ \t]*k[ \t]*=[ \t]*\d+)"
    rb"(?:,[ \t]*largest[ \t]*=[ \t]*true)?\)"
)
_REWRITES = (
    # Pattern: mhlo.erf %x : T -> chlo.erf %x : T -> T
    (
        _FIRST + _UNARY + _OPERAND_AND_TYPE,
        rb"\g<begin>chlo.\g<name>\g<operand> : \g<type> -> \g<type>",
    ),
    # Pattern: mhlo.copy %x : T -> stablehlo.reshape %x : (T) -> T, which does nothing
    (
        _FIRST + rb"copy" + _OPERAND_AND_TYPE,
        rb"\g<begin>stablehlo.reshape\g<operand> : (\g<type>) -> \g<type>",
    ),
    # Pattern: mhlo.topk(%x, k = 4) -> chlo.top_k(%x, k = 4), unless the smallest are wanted
    (_FIRST + _TOP_K, rb"\g<begin>chlo.top_k(\g<rest>)"),
    # Pattern: "mhlo.erf"(%x) : (T) -> T -> "chlo.erf"(%x) : (T) -> T
    (rb"\"mhlo\." + _UNARY + rb"\"(?=[ \t]*\()", rb'"chlo.\g<name>"'),
    # Pattern: "mhlo.copy"(%x) : (T) -> T -> "stablehlo.reshape"(%x) : (T) -> T
    (rb"\"mhlo\.copy\"(?=[ \t]*\()", rb'"stablehlo.reshape"'),
)
_COMPILED = tuple((re.compile(b"(?m)" + pattern), new) for pattern, new in _REWRITES)
_NAMES = re.compile(rb"mhlo\.(?:copy|topk|" + _UNARY + rb")\b")
_HAS_OPS = re.compile(rb"(?m)(?:(?:=|^)[ \t]*|\")mhlo\.(?:copy|topk|" + _UNARY + rb")\b")


def without_mhlo(text: bytes) -> bytes:
    """The text with the ops replaced; the same object if there are none."""
    # Looking for the names alone takes a hundredth of the time: they begin with one word.
    if _NAMES.search(text) is None or _HAS_OPS.search(text) is None:
        return text
    for pattern, new in _COMPILED:
        text = pattern.sub(new, text)
    return text
