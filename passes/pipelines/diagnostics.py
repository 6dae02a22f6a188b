"""Diagnostics as a compiler prints them: where, how grave, what.

MLIR's bindings put only errors into Python exceptions, and end the process when they meet text
that is not UTF-8. So the command line tools read what a context says by a handler of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, cast

from alpa.dialects import file_position, ir

Severity = Literal["error", "warning", "remark", "note"]

_NOTE = re.compile(r"\n(.*):(\d+):(\d+): note: ")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HEX = re.compile(rb"\\([0-9A-F]{2})")
_PARTS = 3  # of a name that JAX makes of the names of modules, transformations and ops
_OPERATION_NOTE = "see current operation: "


@dataclasses.dataclass(frozen=True)
class Place:
    """A position in a file. `file` is the location's own text and `line` 0 where there is none."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One line of diagnostics; notes follow the error they belong to."""

    severity: Severity
    place: Place
    message: str

    def __str__(self) -> str:
        return printable(f"{self.place}: {self.severity}: {self.message}")


def printable(text: str) -> str:
    """A text whose control characters are written out, but line ends and tabs.

    Names in a program come from others, and a terminal would obey codes in them.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def place_of(location: ir.Location) -> Place:
    """The first file position inside a location: named, call-site and fused ones are opened."""
    position = file_position(location)
    if position is not None:
        return Place(position.filename, position.start_line, position.start_col)
    if isinstance(location, ir.UnknownLoc):
        return Place("unknown")
    return Place(str(location).removeprefix("loc(").removesuffix(")").replace('"', ""))


def name_of(location: ir.Location) -> str:
    """The end of the name that JAX gives an op, such as `attention/qkv/dot_general`; empty where a
    location has no name."""
    location = ir.Location.from_attr(location.attr, location.context)
    if isinstance(location, ir.NameLoc):
        return "/".join(location.name_str.split("/")[-_PARTS:])
    if isinstance(location, ir.CallSiteLoc):
        return name_of(location.callee) or name_of(location.caller)
    return ""


def format_error(error: ir.MLIRError) -> str:
    """The diagnostics of an error as a compiler prints them: `file:line:col: error: message`."""
    lines: list[str] = []
    for diagnostic in error.error_diagnostics:
        lines.append(f"{place_of(diagnostic.location)}: error: {diagnostic.message}")
        lines += [f"{place_of(note.location)}: note: {note.message}" for note in diagnostic.notes]
    return printable("\n".join(lines) or error.message)


def with_notes(message: str, notes: tuple[tuple[ir.Location, str], ...]) -> str:
    """An error's message with its notes as further lines, since the bindings emit no notes."""
    return "\n".join([message] + [f"{place_of(where)}: note: {note}" for where, note in notes])


def is_utf8(module: ir.Module) -> bool:
    """Whether all strings of a module are UTF-8. MLIR prints other bytes than ASCII in hex."""
    text = cast(str, module.operation.get_asm(enable_debug_info=True))
    plain = text.replace("\\\\", "/").encode()  # An escaped backslash begins no byte.
    try:
        _HEX.sub(lambda match: bytes.fromhex(match[1].decode()), plain).decode()
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def listening(context: ir.Context, sink: Callable[[Diagnostic], None]) -> Generator[None]:
    """Sends each diagnostic of a context to `sink` instead of to errors and standard error.

    An `ir.MLIRError` that is raised meanwhile holds no diagnostics of its own.
    """

    def handle(diagnostic: Any) -> bool:
        for each in _read(diagnostic):
            sink(each)
        return True

    before = context.emit_error_diagnostics
    context.emit_error_diagnostics = True
    handler = cast(Any, context.attach_diagnostic_handler(handle))
    try:
        yield
    finally:
        handler.detach()
        context.emit_error_diagnostics = before


def _read(diagnostic: Any) -> Iterator[Diagnostic]:
    severity = cast(Severity, diagnostic.severity.name.lower())
    message, *notes = _NOTE.split(_message(diagnostic))
    yield Diagnostic(severity, place_of(diagnostic.location), message)
    for at in range(0, len(notes), 4):
        file, line, column, note = notes[at : at + 4]
        yield Diagnostic("note", Place(file, int(line), int(column)), note)
    for note in diagnostic.notes:
        # MLIR prints the op, with all its regions, after every error at one: the source says it.
        if not _message(note).startswith(_OPERATION_NOTE):
            yield from _read(note)


def _message(diagnostic: Any) -> str:
    try:
        return diagnostic.message
    except (UnicodeDecodeError, RuntimeError):
        return "the input holds text that is not UTF-8"
