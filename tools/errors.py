"""Prints the errors of commands that read a program from a file."""

from __future__ import annotations

import sys

from alpa.dialects import ir
from alpa.dialects.checks import CheckError
from alpa.passes import PassError
from alpa.passes.pipelines.diagnostics import format_error, place_of, printable


def fail(error: Exception, file: str) -> int:
    """Prints an error at its op, or else at the file; returns the exit status."""
    print(printable(_sentence(error, file)), file=sys.stderr)
    return 1


def _sentence(error: Exception, file: str) -> str:
    match error:
        case ir.MLIRError():
            return format_error(error)
        case CheckError() | PassError():
            return f"{place_of(error.location)}: error: {error.message}"
        case OSError():
            return f"{error.filename or file}: error: {error.strerror or error}"
        case _:
            return f"{file}: error: {error}"
