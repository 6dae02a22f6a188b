"""Runs a command so that nothing that MLIR's C++ does with a program takes the answer along.

MLIR's readers and passes trust what they read: there are programs, broken bytecode above all, at
which they end the process, and some at which they never end.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

from alpa.dialects import ir, is_bytecode, parse_file


def guard(name: str) -> None:
    """Goes on in a process of its own; this one waits for it, and says so where a signal ends it.

    To be called first, while there are no threads. The exit status is that of the new process, or
    1.
    """
    with warnings.catch_warnings():
        # jax warns of threads, and has none before it is asked for a device.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        child = os.fork()
    if child == 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts both
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        number = signal.Signals(-code)
        print(f"{name}: error: {_sentence(number)}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _sentence(number: signal.Signals) -> str:
    if number is signal.SIGALRM:
        return "MLIR's bytecode reader found no end; the file is broken"
    if number is signal.SIGTERM:
        return "terminated"
    if number is signal.SIGKILL:
        return "the system has ended this process (SIGKILL); it may have needed too much memory"
    return (
        f"MLIR's C++ has ended the process ({number.name}), and nothing was written. Where the "
        "program is bytecode, or was changed by hand, it is broken in a way that MLIR does not "
        "notice; else a pass fails on it, and --print-ir-after-all shows which"
    )


def parse_within(file: str, context: ir.Context | None = None) -> ir.Module:
    """A verified module from a file, text or bytecode.

    Raises:
        OSError: it cannot be read; MLIR's own message for that names no reason.
        ir.MLIRError: it does not parse or verify.
    """
    with open(file, "rb") as stream:
        binary = is_bytecode(stream.read(4))
    with reading_bytecode() if binary else nullcontext():
        return parse_file(file, context)


@contextmanager
def reading_bytecode(seconds: int = 60) -> Generator[None]:
    """Ends the process by SIGALRM, which `guard` explains, if reading takes longer.

    The largest programs take less than a second.
    """
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
