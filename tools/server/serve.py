"""The two kinds of servers: for one client on standard input and output, or on a Unix socket."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from alpa.dialects import ir
from alpa.passes import pipeline
from alpa.passes.pipelines.clock import Clock
from alpa.tools.run_pipeline import Source, make_unthreaded_context, run_pipeline
from alpa.tools.server.child import Child
from alpa.tools.server.listener import listening_at
from alpa.tools.server.requests import answer_all

_SOLVERS = (
    "alpa.passes.solve.layers.layer_dp",
    "alpa.passes.solve.layers.narrow",
    "alpa.passes.solve.sharding.ilp",
    "alpa.passes.solve.sharding.pareto",
    "alpa.passes.solve.tapas.search",
    "highspy",
)
"""Modules that passes import only when they solve something."""
_MOST_CLIENTS = 64
"""Clients that are served at a time, each by a process. Others wait until one has gone."""

_CLIENT_GRACE_SECONDS = 10.0
"""Until a client's process is killed: longer than it gives its request."""


def serve_standard_input(limit: int) -> None:
    """Serves one client until the end of standard input.

    Raises:
        ConnectionError: the client has closed standard output.
    """
    _end_on_sigterm()
    reading, writing = os.dup(0), os.dup(1)
    # What a library reads or prints is no part of the protocol.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    answer_all(reading, writing, limit, warm())


def serve_socket(path: Path, limit: int) -> NoReturn:
    """Serves clients on a Unix socket until a signal ends the process.

    Raises:
        OSError: there can be no socket at this path (`listening_at`).
    """
    _end_on_sigterm()
    with listening_at(path) as listener:
        context = warm()
        print(f"alpa-opt: listening at {path}", file=sys.stderr, flush=True)
        _serve_clients(listener, limit, context)


def warm() -> ir.Context:
    """Imports all passes and runs MLIR once, so that forked processes begin with that done.

    Returns:
        A context for their programs.
    """
    for name in pipeline.PASSES:
        pipeline.load_pass(name)
    for name in _SOLVERS:
        importlib.import_module(name)
    context = make_unthreaded_context()
    empty = Source(file="", data=b"")
    run_pipeline(context, empty, "canonicalize", lambda said: None, Clock())
    gc.collect()
    gc.freeze()  # A collection in a forked process would copy the pages of all objects.
    return context


def _end_on_sigterm() -> None:
    """SIGTERM, by which services are stopped, ends the server with status 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _serve_clients(listener: socket.socket, limit: int, context: ir.Context) -> NoReturn:
    clients: dict[int, Child] = {}
    try:
        while True:
            files = [*clients] if len(clients) == _MOST_CLIENTS else [listener, *clients]
            ready, _, _ = select.select(files, [], [])
            for file in ready:
                if isinstance(file, int):  # A client's process has closed its pipe: it ends.
                    clients.pop(file).wait()
                elif (client := _admitted(listener, limit, context)) is not None:
                    clients[client.file] = client
    finally:
        for client in clients.values():
            client.interrupt()
        for client in clients.values():
            client.end(_CLIENT_GRACE_SECONDS)


def _admitted(listener: socket.socket, limit: int, context: ir.Context) -> Child | None:
    """A process that serves the next client; None if there is no client or no process."""

    def answer(_: int) -> None:
        listener.close()
        # A client may go at any time.
        with suppress(ConnectionError):
            answer_all(connection.fileno(), connection.fileno(), limit, context)

    try:
        connection, _ = listener.accept()
    except ConnectionError:
        return None
    with connection:
        try:
            return Child.start(answer)
        except OSError as error:
            print(f"alpa-opt: error: cannot start a process: {error.strerror}", file=sys.stderr)
            return None
