"""Runs a command in a separate process, so that a crash in MLIR's C++ still gives an error message.

MLIR's readers and passes trust their input. Some programs, above all broken bytecode, crash the
process, and some make it run forever.
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
    """Continues in a new process; this one waits for it, and reports a signal that ends it.

    Call it first, while there are no threads. The exit status is that of the new process, or 1.
    """
    with warnings.catch_warnings():
        # JAX warns about threads, but has none before it uses a device.
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
        return "MLIR's bytecode reader did not finish; the file is broken"
    if number is signal.SIGTERM:
        return "terminated"
    if number is signal.SIGKILL:
        return "the system has ended this process (SIGKILL); it may have needed too much memory"
    return (
        f"MLIR's C++ has crashed ({number.name}), and nothing was written. If the program is "
        "bytecode or was changed by hand, it is broken in a way that MLIR does not detect; "
        "otherwise a pass fails on it, and --print-ir-after-all shows which"
    )


def parse_within(file: str, context: ir.Context | None = None) -> ir.Module:
    """Parses and verifies a module from a file, text or bytecode.

    Raises:
        OSError: it cannot be read; MLIR's own message gives no reason.
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
