"""Runs a pipeline on a program whose diagnostics are all heard, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext

from alpa.dialects import ir, is_bytecode, make_context, passmanager
from alpa.passes import pipeline
from alpa.passes.pipeline import OnManager, OnPass
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, listening, place_of

_NO_FILE = "-"
"""MLIR's name for a source that is no file."""


class NotTextError(ValueError):
    """A source is neither bytecode nor UTF-8; `place` is that of the first wrong byte."""

    def __init__(self, place: Place) -> None:
        super().__init__("neither MLIR bytecode nor text: this byte is not UTF-8")
        self.place = place


def run_diagnosed(
    read: Callable[[ir.Context], ir.Module],
    text: str,
    sink: Callable[[Diagnostic], None],
    *,
    file: str,
    on_pass: OnPass = nullcontext,
    on_manager: OnManager | None = None,
    configure: Callable[[passmanager.PassManager], None] | None = None,
) -> ir.Module | None:
    """Returns the module after the pipeline, or None after an error; diagnostics go to `sink`.

    Args:
        read: parses the program into a context.
        text: the pipeline.
        sink: receives the diagnostics.
        file: the program's name in diagnostics, where MLIR knows none.
        on_pass: as in `alpa.passes.run`.
        on_manager: as in `alpa.passes.add_to`.
        configure: receives the pass manager of the whole pipeline before that runs.

    Raises:
        PipelineError: the pipeline's text is wrong.
    """
    context = make_context()
    # Without threads, diagnostics come in order, and IR can be printed.
    context.enable_multithreading(False)
    errors = 0

    def hear(diagnostic: Diagnostic) -> None:
        nonlocal errors
        errors += diagnostic.severity == "error"
        sink(dataclasses.replace(diagnostic, place=named(diagnostic.place, file)))

    def remark(location: ir.Location, message: str) -> None:
        hear(Diagnostic("remark", place_of(location), message))

    with listening(context, hear):
        try:
            module = read(context)
            manager = passmanager.PassManager("builtin.module", context=context)
            pipeline.add_to(manager, text, on_remark=remark, on_pass=on_pass, on_manager=on_manager)
            if configure is not None:
                configure(manager)
            manager.run(module.operation)
        except ir.MLIRError as error:
            if not errors:
                hear(Diagnostic("error", Place(file), error.message))
            return None
    return None if errors else module


def named(place: Place, file: str) -> Place:
    """A place as MLIR names it, with the name `file` if MLIR knows none."""
    return dataclasses.replace(place, file=file) if place.file == _NO_FILE else place


def check_text(data: bytes, file: str) -> None:
    """Raises NotTextError if a source is neither bytecode nor UTF-8."""
    if is_bytecode(data):
        return
    try:
        data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise NotTextError(Place(file, line, column)) from error
