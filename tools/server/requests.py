"""Answers the requests of one client, one after the other."""

from __future__ import annotations

import base64
import os
import select
import signal

import alpa
from alpa.dialects import bytecode, ir
from alpa.passes.base import quiet
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic
from alpa.passes.pipelines.text import PipelineError
from alpa.tools.guard import end_by_signal
from alpa.tools.interrupts import INTERRUPTED
from alpa.tools.run_pipeline import Source, run_pipeline, text_of
from alpa.tools.server import protocol
from alpa.tools.server.child import Child
from alpa.tools.server.lines import Lines, LineTooLongError, write_all
from alpa.tools.server.protocol import Hello, RequestError, Run

_CHUNK = 1 << 20


def answer_all(reading: int, writing: int, limit: int, context: ir.Context) -> None:
    """Answers requests until the end of the input.

    Args:
        reading: where requests come from.
        writing: where answers go.
        limit: the largest number of bytes of a request.
        context: where programs are parsed, each in a copy of this process.

    Raises:
        ConnectionError: the client reads no answers any more.
    """
    lines = Lines(reading, limit)
    while True:
        try:
            line = lines.next()
            if line is None:
                return
            if not line.strip():
                continue
            request = protocol.read_request(line)
        except LineTooLongError:
            text = f"a line has more than {limit} bytes; --max-request-bytes raises the limit"
            write_all(writing, protocol.error(None, protocol.NO_REQUEST, text))
        except RequestError as error:
            write_all(writing, protocol.error(error.id, error.code, error.message))
        else:
            if isinstance(request, Hello):
                write_all(writing, _hello(request, limit))
            else:
                _run_apart(request, writing, context)


def _hello(request: Hello, limit: int) -> bytes:
    return protocol.result(
        request.id,
        {
            "name": "alpa-opt",
            "version": alpa.__version__,
            "protocol": protocol.PROTOCOL,
            "max_request_bytes": limit,
        },
    )


def _run_apart(request: Run, writing: int, context: ir.Context) -> None:
    """Runs a request in a process of its own and passes on what that writes.

    Raises:
        ConnectionError: the client reads no answers any more; the process has been ended.
    """
    try:
        child = Child.start(lambda file: run(request, file, context))
    except OSError as error:
        text = f"cannot start a process: {error.strerror}"
        write_all(writing, protocol.error(request.id, protocol.ENDED, text))
        return
    try:
        _forward(child.file, writing)
    except BaseException:
        child.end()
        raise
    status = child.wait()
    if status:
        write_all(writing, protocol.error(request.id, protocol.ENDED, _ended(status)))


def _forward(reading: int, writing: int) -> None:
    """Passes on whole lines until the end. Raises ConnectionError if the client has gone."""
    held: list[bytes] = []
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(writing, 0)  # Reports only that the other end is closed.
    while True:
        if any(file == writing for file, _ in poll.poll()):
            raise BrokenPipeError
        chunk = os.read(reading, _CHUNK)
        if not chunk:
            return
        whole = chunk.rfind(b"\n") + 1
        if whole:
            write_all(writing, b"".join((*held, chunk[:whole])))
            held.clear()
        held.append(chunk[whole:])


def _ended(status: int) -> str:
    """Why a process ended without an answer."""
    if status < 0:
        return end_by_signal(signal.Signals(-status))
    if status == INTERRUPTED:
        return "interrupted"
    return "an internal error, whose traceback is on the server's standard error"


def run(request: Run, writing: int, context: ir.Context) -> None:
    """Runs a request in this process, and writes its answer."""

    def show(what: str, done: int = 0, total: int = 0) -> None:
        write_all(writing, protocol.progress(request.id, what, done, total))

    said: list[Diagnostic] = []
    clock = Clock(show if request.progress else quiet)
    source = Source(file=request.file, data=request.data)
    try:
        module = run_pipeline(context, source, request.pipeline, said.append, clock)
    except PipelineError as error:
        answer = protocol.pipeline_error(request.id, error)
    else:
        if module is None:
            text = "\n".join(map(str, said))
            answer = protocol.error(request.id, protocol.REFUSED, text, said)
        else:
            found: dict[str, object] = {
                "diagnostics": [protocol.written(each) for each in said],
                "seconds": clock.seconds,
            }
            if request.output == "text":
                found["module"] = text_of(module, locations=request.locations)
            elif request.output == "bytecode":
                found["bytecode"] = base64.b64encode(bytecode(module.operation)).decode()
            answer = protocol.result(request.id, found)
    write_all(writing, answer)
