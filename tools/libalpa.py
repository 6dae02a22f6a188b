"""What `libalpa` calls in Python: runs a pipeline on a program in memory, and answers in bytes.

`cmake/alpa/libalpa/alpa.c` calls `run_passes` and `plan`, and copies the answer. All texts are
UTF-8. Both check `PROTOCOL`, because the library may be older or newer than the installed package.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from alpa.dialects import bytecode, ir, is_bytecode, parse
from alpa.dialects.checks import CheckError
from alpa.passes.base import PassError
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, Severity, place_of, printable
from alpa.passes.pipelines.text import PipelineError
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import plan_table
from alpa.tools.run_pipeline import (
    NotTextError,
    Source,
    decoded,
    make_unthreaded_context,
    run_pipeline,
)

PROTOCOL = 1
"""The version of these functions and of `Answer`, as in `alpa.c`."""

_FILE = "module"
"""The program's name in diagnostics where its locations name no file."""
_PIPELINE = "pipeline"
_SEVERITIES: dict[Severity, int] = {"error": 0, "warning": 1, "remark": 2, "note": 3}
"""As in `alpa.h`."""


class _Program(Source):
    """A program of the host's, whose alarms and signals are left alone."""

    def parse(self, context: ir.Context) -> ir.Module:
        return parse(self.data, context)


class Status(IntEnum):
    """How a call ended, as in `alpa.h`."""

    OK = 0
    PIPELINE_ERROR = 3
    PROGRAM_ERROR = 4
    INTERRUPTED = 5


class Answer(NamedTuple):
    """What a call answers; `alpa.c` reads the fields by their order."""

    status: int
    error: bytes | None
    """the errors and their notes, a line each; None without an error"""
    diagnostics: tuple[tuple[int, bytes, int, int, bytes], ...]
    """severity, file, line, column and message"""
    text: bytes | None = None
    bytecode: bytes | None = None
    plan: bytes | None = None
    """`PLAN.json`"""
    table: bytes | None = None


def run_passes(source: bytes, pipeline: bytes) -> Answer:
    """Runs any pipeline on a program, text or bytecode."""
    return _answer(source, pipeline, plans=False)


def plan(source: bytes, pipeline: bytes) -> Answer:
    """As `run_passes`, of a pipeline that leaves a plan; the answer also has `plan` and `table`."""
    return _answer(source, pipeline, plans=True)


def _answer(source: bytes, pipeline: bytes, *, plans: bool) -> Answer:
    heard: list[Diagnostic] = []
    clock, program = Clock(), _Program(file=_FILE, data=source)
    status, module, report = Status.PROGRAM_ERROR, None, None
    try:
        if not is_bytecode(source):
            decoded(source, _FILE)
        module = run_pipeline(
            make_unthreaded_context(), program, _text(pipeline), heard.append, clock
        )
        if module is not None:
            report = PlanReport.of(module).searched(clock.seconds) if plans else None
            status = Status.OK
    except NotTextError as error:
        heard.append(Diagnostic("error", error.place, str(error)))
    except PipelineError as error:
        status = Status.PIPELINE_ERROR
        place = Place(_PIPELINE, error.line, error.column)
        heard.append(Diagnostic("error", place, error.message))
        if error.note:
            heard.append(Diagnostic("note", place, error.note))
    except (CheckError, PassError) as error:
        message = f"the pipeline leaves no plan: {error.message}"
        heard.append(Diagnostic("error", program.place(place_of(error.location)), message))
    except KeyboardInterrupt:
        status = Status.INTERRUPTED
        heard.append(Diagnostic("error", Place(_FILE), "interrupted"))
    if status is not Status.OK or module is None:
        return Answer(status, _errors(heard), _packed(heard))
    return Answer(
        status,
        None,
        _packed(heard),
        text=f"{module.operation.get_asm()}".encode(),
        bytecode=bytecode(module.operation),
        plan=report and report.to_json().encode(),
        table=report and plan_table(module, report).encode(),
    )


def _text(pipeline: bytes) -> str:
    """A pipeline's text. Raises PipelineError."""
    try:
        return pipeline.decode()
    except UnicodeDecodeError as error:
        text = pipeline.decode(errors="replace")
        at = len(pipeline[: error.start].decode())
        raise PipelineError(text, at, "this byte is not UTF-8") from error


def _errors(heard: list[Diagnostic]) -> bytes:
    """The errors with their notes, as a compiler prints them."""
    lines: list[str] = []
    of_error = False
    for diagnostic in heard:
        if diagnostic.severity != "note":
            of_error = diagnostic.severity == "error"
        if of_error:
            lines.append(str(diagnostic))
    return "\n".join(lines).encode()


def _packed(heard: list[Diagnostic]) -> tuple[tuple[int, bytes, int, int, bytes], ...]:
    return tuple(
        (
            _SEVERITIES[it.severity],
            printable(it.place.file).encode(),
            it.place.line,
            it.place.column,
            printable(it.message).encode(),
        )
        for it in heard
    )
