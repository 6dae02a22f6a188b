"""Reads HLO, as text or as a serialised proto, as XLA dumps it, and converts it to StableHLO.

XLA's text leaves out the values of large constants, `constant({...})`, and XLA's parser would read
zeros. Such a constant becomes an elided constant of MLIR.

XLA's conversion replaces the tuples among parameters and results by their elements, and leaves the
numbers of donated ones as they were; they are counted anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from alpa.dialects.bindings import attributes_of, ir, make_context, stablehlo, walk
from alpa.dialects.hlo_aliases import ALIASES, Alias
from alpa.dialects.hlo_text import UNARY
from alpa.dialects.reading import is_hlo_text, parse

_ELIDED = "alpa.elided"
_ELIDED_TEXT = re.compile(r"\bconstant\(\{\.\.\.\}\)")
_PLACE = re.compile(r"was parsing (\d+):(\d+): error: ([^\n]+)")
_SMALLEST = re.compile(r"\btopk\([^\n]*\blargest=false")
_UNREADABLE = ("kFusion", "kAsyncStart", "kCopyStart")
"""Ops whose form in MHLO the bindings, which lack that dialect, cannot read."""
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
        HloError: it is none of these, or an op cannot be written in StableHLO, as those that XLA
            makes when it optimises a module.
    """
    # They take 0.3 s to import, and few programs come from HLO.
    from jaxlib import _hlo, _jax  # noqa: PLC0415  # pyright: ignore[reportAttributeAccessIssue]

    module = _from_text(_hlo, data) if is_hlo_text(data) else _from_proto(_hlo, data)
    if _SMALLEST.search(module.to_string()):
        raise HloError("topk of the smallest values (largest=false) is not in StableHLO")
    proto = module.as_serialized_hlo_module_proto()
    try:
        converted = _jax.mlir.hlo_to_stablehlo(proto)
    except RuntimeError as error:
        raise HloError(f"XLA cannot convert this module: {error}") from error
    # XLA leaves some ops in MHLO, a dialect that the bindings do not have.
    permissive = make_context()
    permissive.allow_unregistered_dialects = True
    try:
        read = ir.Module.parse(converted, permissive)
    except ir.MLIRError as error:
        raise _without_counterpart(module, _UNREADABLE, data) from error
    left = _without_mhlo(read)
    if left:
        raise _without_counterpart(module, left, data)
    _count_flat(read, _hlo.XlaComputation(proto).program_shape())
    result = parse(str(read.operation.get_asm(enable_debug_info=True)), context)
    _elide(result)
    return result


def _without_mhlo(module: ir.Module) -> list[str]:
    """Replaces ops of MHLO by ones of StableHLO and CHLO; the opcodes of those that have none."""
    left: list[str] = []
    for op in list(walk(module.body)):
        name = op.operation.name
        if not name.startswith("mhlo."):
            continue
        attributes: dict[str, ir.Attribute] = {
            key: it
            for key, it in attributes_of(op)
            if key.startswith("mhlo.") and isinstance(it, ir.Attribute)
        }
        if name == "mhlo.topk":  # Its k is the size of the results.
            k = ir.RankedTensorType(op.results[0].type).shape[-1]
            i64 = ir.IntegerType.get_signless(64, module.context)
            name = "chlo.top_k"
            attributes["k"] = ir.IntegerAttr.get(i64, k)
        elif name == "mhlo.copy":
            name = "stablehlo.reshape"
        elif name.removeprefix("mhlo.") in UNARY:
            name = name.replace("mhlo", "chlo")
        else:
            words = name.rpartition(".")[2].split("_")
            left.append("k" + "".join(map(str.capitalize, words)))
            continue
        with ir.InsertionPoint(op), op.location:
            types = [value.type for value in op.results]
            made = ir.Operation.create(name, types, list(op.operands), attributes)
        for value, other in zip(op.results, made.results, strict=True):
            value.replace_all_uses_with(other)
        op.operation.erase()
    return left


def _without_counterpart(module: Any, opcodes: Sequence[str], data: bytes) -> HloError:
    """The error for the first op with one of these opcodes, at its place if the file is text."""
    every = [it for computation in module.computations() for it in computation.instructions()]
    found = [(it.opcode.name, it.name) for it in every if it.opcode.name in opcodes]
    if not found:
        return HloError("XLA writes an op of this module in a form that cannot be read")
    opcode, name = found[0]
    shown = re.sub("(?!^)([A-Z])", r"-\1", opcode[1:]).lower()
    message = (
        f"{shown} has no counterpart in StableHLO; if XLA has optimised this module, give it as it "
        "was before: XLA dumps it as *.before_optimizations.txt"
    )
    if not is_hlo_text(data):
        return HloError(message)
    place = re.search(rf"^[ \t]*(?:ROOT )?%?{re.escape(name)} = ".encode(), data, re.MULTILINE)
    if place is None:
        return HloError(message)
    before = data[: place.end()]
    before = before[: len(before) - len(before.rpartition(b"\n")[2].lstrip())]
    return HloError(message, before.count(b"\n") + 1, len(before.rpartition(b"\n")[2]) + 1)


def _count_flat(module: ir.Module, shape: Any) -> None:
    """Numbers the parameters and results in `mhlo.input_output_alias` without tuples."""
    attributes = module.operation.attributes
    if ALIASES not in attributes:
        return
    parameters: list[tuple[int, ...]] = [
        (n, *path) for n, it in enumerate(shape.parameter_shapes()) for path in _leaves(it)
    ]
    results = list(_leaves(shape.result_shape()))
    flat = list[ir.Attribute]()
    for alias in Alias.read(attributes[ALIASES]):
        r = results.index(alias.result)
        one = replace(
            alias,
            argument=(parameters.index(alias.argument),),
            result=(r,) if len(results) > 1 else (),
        )
        flat.append(one.to_attr(module.context))
    attributes[ALIASES] = ir.ArrayAttr.get(flat, module.context)


def _leaves(shape: Any) -> Iterator[tuple[int, ...]]:
    """The path of each element of a shape of HLO, which may be a tuple of others."""
    if not shape.is_tuple():
        yield ()
        return
    for number, part in enumerate(shape.tuple_shapes()):
        for path in _leaves(part):
            yield (number, *path)


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
