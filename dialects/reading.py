"""Reads modules from MLIR text, MLIR bytecode and StableHLO's portable artifacts; copies of them.

A portable artifact is bytecode of VHLO, StableHLO's versioned form, which later versions of
StableHLO read and earlier ones can be written for.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, cast

import numpy as np

from alpa.dialects.bindings import ir, make_context, stablehlo, walk
from alpa.dialects.hlo_text import without_mhlo

_DEEPEST = 1000
"""The largest depth of nested brackets. MLIR's reader recurses for each. From about 3000 nested
modules on, it overflows the stack and crashes the process."""
_BRACKETS = b"([{)]}"
_OTHERS = bytes(set(range(256)) - {*_BRACKETS})
_NO_CODE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|//[^\n]*')
"""Strings and comments."""
_HLO = re.compile(rb"\s*(?://[^\n]*\s+)*HloModule\b")
_BYTECODE = b"ML\xefR"
_PRODUCER = re.compile(re.escape(_BYTECODE) + rb".StableHLO_v(\d+\.\d+\.\d+)\0", re.DOTALL)
"""How a portable artifact begins. A byte has the version of the bytecode, a text its producer."""


class UnreadableError(ir.MLIRError):
    """MLIR's reader failed without a diagnostic: broken bytecode, or text that is nested too deep.

    The message is complete.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, [])
        self._message = message
        self._error_diagnostics: list[ir.DiagnosticInfo] = []

    def __str__(self) -> str:
        return self._message


def parse(source: str | bytes, context: ir.Context | None = None) -> ir.Module:
    """Parses and verifies a module from MLIR text, bytecode or a portable artifact.

    Raises:
        ir.MLIRError: the source does not parse or verify; the diagnostics have places.
    """
    try:
        data = source.encode() if isinstance(source, str) else source
    except UnicodeEncodeError as error:
        raise _unreadable(str(error)) from error
    version = portable_version(data)
    if version is not None:
        return _read_portable(data, version, context or make_context())
    _check_text(data)
    try:
        text = data if is_bytecode(data) else without_mhlo(data)
        return ir.Module.parse(text, context or make_context())
    except (ValueError, MemoryError) as error:
        raise _unreadable(str(error)) from error


def parse_file(path: str | Path, context: ir.Context | None = None) -> ir.Module:
    """Parses a file like `parse`; the locations of text carry its path."""
    if Path(path).is_file():
        data = Path(path).read_bytes()
        if portable_version(data) is not None:
            return parse(data, context)
        if not is_bytecode(data) and (changed := without_mhlo(data)) is not data:
            module = parse(changed, context)
            _name_file(module, str(path))
            return module
        _check_text(data)
    try:
        return ir.Module.parseFile(str(path), context or make_context())
    except (ValueError, MemoryError) as error:
        raise _unreadable(str(error)) from error


def _name_file(module: ir.Module, path: str) -> None:
    """Gives the ops of a parsed text the file that it is from; MLIR calls it `-`."""
    with module.context:
        for op in (module.operation, *walk(module.body)):
            where = op.location
            if isinstance(where, ir.FileLineColLoc) and where.filename == "-":
                op.operation.location = ir.Location.file(path, where.start_line, where.start_col)


def bytecode(nested: ir.Module | ir.OpView | ir.Operation) -> bytes:
    """A module, which may be nested in another one, in bytecode."""
    buffer = io.BytesIO()
    nested.operation.write_bytecode(buffer)
    return buffer.getvalue()


def separate(nested: ir.Module | ir.OpView | ir.Operation) -> ir.Module:
    """A copy of a module, which may be nested in another one, as a module of its own."""
    return parse(bytecode(nested), nested.context)


def move_contents(source: ir.Module, target: ir.Module) -> None:
    """Replaces all that a module holds by what another one does, which is left empty."""
    for op in list(target.body.operations):
        op.operation.erase()
    for op in list(source.body.operations):
        target.body.append(op)
    for name in list(target.operation.attributes):
        del target.operation.attributes[name]
    for name in list(source.operation.attributes):
        target.operation.attributes[name] = source.operation.attributes[name]


def is_bytecode(data: bytes) -> bool:
    """Whether a file that begins like this is MLIR bytecode, which portable artifacts are too."""
    return data.startswith(_BYTECODE)


def is_hlo_text(data: bytes) -> bool:
    """Whether a file that begins like this is HLO, XLA's own format, as text."""
    return _HLO.match(data) is not None


def portable_version(data: bytes) -> str | None:
    """The version of StableHLO that a portable artifact is written in; None for other files."""
    found = _PRODUCER.match(data)
    return found[1].decode() if found else None


def _read_portable(data: bytes, version: str, context: ir.Context) -> ir.Module:
    """Reads a portable artifact. Raises UnreadableError."""
    said: list[str] = []

    def hear(diagnostic: Any) -> bool:
        said.append(diagnostic.message)
        return True

    handler = cast(Any, context.attach_diagnostic_handler(hear))
    try:
        return stablehlo.deserialize_portable_artifact(context, data)
    except ValueError as error:
        oldest, newest = stablehlo.get_minimum_version(), stablehlo.get_current_version()
        message = (
            f"this portable artifact of StableHLO {version} cannot be read; this jaxlib reads "
            f"{oldest} to {newest}"
        )
        if stablehlo.get_smaller_version(version, newest) == version:
            message = f"{message}: {said[0] if said else error}"
        raise UnreadableError(message) from error
    finally:
        handler.detach()


def _unreadable(reason: str) -> UnreadableError:
    return UnreadableError(f"this is not an MLIR module: {reason}")


def _check_text(text: bytes) -> None:
    """Raises UnreadableError if the input, text or not, is HLO or nested too deep."""
    if is_hlo_text(text):
        raise UnreadableError(
            "this is HLO, not MLIR; convert it to StableHLO: alpa-opt --convert-hlo FILE -o OUT"
        )
    if is_bytecode(text) or _depth(text) <= _DEEPEST:
        return
    # Brackets in strings and comments may be unbalanced, so they are removed when it matters.
    depth = _depth(_NO_CODE.sub(b"", text))
    if depth > _DEEPEST:
        raise _unreadable(f"it has {depth:,} nested brackets; at most {_DEEPEST:,} are allowed")


def _depth(text: bytes) -> int:
    brackets = np.frombuffer(text.translate(None, _OTHERS), np.uint8)
    opens = np.isin(brackets, list(b"([{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))
