"""Runs a pipeline on one module, for `alpa-opt`, its server, and `libalpa`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

from alpa.dialects import ir, is_bytecode, make_context, parse, parse_file, passmanager
from alpa.passes import pipeline
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, listening, place_of
from alpa.tools.guard import parsing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The source of one module, from the input `file`; `path` if it can be read again."""

    file: str
    data: bytes
    path: str | None = None

    @property
    def lines(self) -> list[str]:
        return [] if is_bytecode(self.data) else self.data.decode().split("\n")

    def parse(self, context: ir.Context) -> ir.Module:
        with parsing(len(self.data)):
            if self.path is None or is_bytecode(self.data):
                return parse(self.data, context)
            return parse_file(self.path, context)

    def place(self, place: Place) -> Place:
        """A place as MLIR names it, with this input's name if MLIR does not know it."""
        is_named = place.file not in ("-", "unknown")
        return place if is_named else dataclasses.replace(place, file=self.file)


class NotTextError(ValueError):
    """A source is neither bytecode nor UTF-8; `place` is that of the first wrong byte."""

    def __init__(self, place: Place) -> None:
        super().__init__("neither MLIR bytecode nor text: this byte is not UTF-8")
        self.place = place


def decoded(data: bytes, file: str) -> str:
    """The text of a source that is no bytecode. Raises NotTextError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise NotTextError(Place(file, line, column)) from error


def make_unthreaded_context() -> ir.Context:
    """A context without threads: diagnostics come in order, IR can be printed, and it survives a
    fork."""
    context = make_context()
    context.enable_multithreading(False)
    return context


def run_pipeline(
    context: ir.Context,
    source: Source,
    text: str,
    sink: Callable[[Diagnostic], None],
    clock: Clock,
    *,
    on_manager: pipeline.OnManager = lambda manager: None,
    timing: bool = False,
) -> ir.Module | None:
    """Returns the module after the pipeline, or None after an error.

    Args:
        context: one of `make_unthreaded_context`.
        source: the program.
        text: the pipeline.
        sink: receives all diagnostics, at least one error if the result is None.
        clock: measures the passes.
        on_manager: receives each pass manager before it runs.
        timing: whether MLIR prints the seconds of its passes.

    Raises:
        PipelineError: the pipeline's text is wrong.
    """
    errors = 0

    def hear(diagnostic: Diagnostic) -> None:
        nonlocal errors
        errors += diagnostic.severity == "error"
        sink(dataclasses.replace(diagnostic, place=source.place(diagnostic.place)))

    def remark(location: ir.Location, message: str) -> None:
        hear(Diagnostic("remark", place_of(location), message))

    with listening(context, hear):
        try:
            module = source.parse(context)
            manager = passmanager.PassManager("builtin.module", context=context)
            pipeline.add_to(
                manager, text, on_remark=remark, on_pass=clock.phase, on_manager=on_manager
            )
            on_manager(manager)
            if timing:
                manager.enable_timing()
            manager.run(module.operation)
        except ir.MLIRError as error:
            if not errors:
                hear(Diagnostic("error", Place(source.file), error.message))
            return None
    return None if errors else module


def text_of(module: ir.Module, *, locations: bool) -> str:
    """A verified module as text that ends in one line end."""
    # As bytes it takes two thirds of the time, even if they are decoded.
    text = cast(
        bytes,
        module.operation.get_asm(binary=True, enable_debug_info=locations, assume_verified=True),
    )
    return text.decode().rstrip("\n") + "\n"
