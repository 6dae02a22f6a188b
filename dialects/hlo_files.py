"""Reads HLO, as text or as a serialised proto, as XLA dumps it, and converts it to StableHLO.

XLA's text leaves out the values of large constants, `constant({...})`, and XLA's parser would read
zeros. Such a constant becomes an elided constant of MLIR.
"""

from __future__ import annotations

import re
from typing import Any

from alpa.dialects.bindings import ir, make_context, stablehlo, walk
from alpa.dialects.reading import parse

_TEXT = re.compile(rb"\s*(?://[^\n]*\s+)*HloModule\b")
_ELIDED = "alpa.elided"
_ELIDED_TEXT = re.compile(r"\bconstant\(\{\.\.\.\}\)")
_PLACE = re.compile(r"was parsing (\d+):(\d+): error: ([^\n]+)")
_SMALLEST = re.compile(r"\btopk\([^\n]*\blargest=false")
# The bindings lack the dialect of this op, and lose its k, which is the size of the results.
_TOP_K = re.compile(
    r'"mhlo\.topk"(\([^()\n]*\)) <[^<>\n]*>( : \([^()\n]*\) -> \(tensor<(?:\d+x)*(\d+)x[a-z])'
)
_FIRST_FIELD = b"\x0a"
"""How a field of bytes with the number 1 begins. HloSnapshot holds an HloProto, which holds an
HloModuleProto, each as its first field."""


class HloError(ValueError):
    """A file is no HLO, or has no StableHLO; `line` and `column` are 0 where they are unknown."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


def read_hlo(data: bytes, context: ir.Context | None = None) -> ir.Module:
    """The StableHLO of an HLO file: text, or an HloModuleProto, HloProto or HloSnapshot.

    Raises:
        HloError: it is none of these, or an op cannot be written in StableHLO.
    """
    # They take 0.3 s to import, and few programs come from HLO.
    from jaxlib import _hlo, _jax  # noqa: PLC0415  # pyright: ignore[reportAttributeAccessIssue]

    module = _from_text(_hlo, data) if _TEXT.match(data) else _from_proto(_hlo, data)
    if _SMALLEST.search(module.to_string()):
        raise HloError("topk of the smallest values (largest=false) is not in StableHLO")
    try:
        converted = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    except RuntimeError as error:
        raise HloError(f"XLA cannot convert this module: {error}") from error
    # What XLA leaves in MHLO, which the bindings do not have, is replaced in text.
    permissive = make_context()
    permissive.allow_unregistered_dialects = True
    text = ir.Module.parse(converted, permissive).operation.get_asm(enable_debug_info=True)
    text = _TOP_K.sub(r'"chlo.top_k"\1 <{k = \3 : i64}>\2', str(text))
    try:
        result = parse(text, context)
    except ir.MLIRError as error:
        raise HloError(error.error_diagnostics[0].message) from error
    _elide(result)
    return result


def _from_text(hlo: Any, data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise HloError(f"this is not HLO text: {error}") from error
    call = f'custom-call(), custom_call_target="{_ELIDED}"'
    try:
        return hlo.hlo_module_from_text(_ELIDED_TEXT.sub(call, text))
    except RuntimeError as error:
        found = _PLACE.search(str(error))
        if found is None:
            raise HloError(f"this is not HLO text: {error}") from error
        raise HloError(found[3], int(found[1]), int(found[2])) from error


def _from_proto(hlo: Any, data: bytes) -> Any:
    # A module's first field is its name, those of what holds it begin with a field of their own.
    while (inner := _first_field(data)).startswith(_FIRST_FIELD):
        data = inner
    try:
        return hlo.HloModule.from_serialized_hlo_module_proto(data)
    except RuntimeError as error:
        raise HloError("this is neither HLO text nor a serialised HLO module") from error


def _first_field(message: bytes) -> bytes:
    """The bytes of the first field of a serialised message; empty if it has none of number 1."""
    if not message.startswith(_FIRST_FIELD):
        return b""
    size, at = 0, 1
    for at, byte in enumerate(message[1:11], 1):
        size |= (byte & 0x7F) << 7 * (at - 1)
        if byte < 0x80:
            break
    return message[at + 1 : at + 1 + size]


def _elide(module: ir.Module) -> None:
    """Replaces the calls that stand for constants without values."""
    for op in list(walk(module.body)):
        if not isinstance(op, stablehlo.CustomCallOp):
            continue
        if ir.StringAttr(op.attributes["call_target_name"]).value == _ELIDED:
            with ir.InsertionPoint(op), op.location:
                type_ = op.results[0].type
                value = ir.Attribute.parse(f"dense_resource<__elided__> : {type_}")
                constant = ir.Operation.create(
                    "stablehlo.constant", [type_], attributes={"value": value}
                )
            op.results[0].replace_all_uses_with(constant.results[0])
            op.operation.erase()
