"""Runs a command in a separate process, so that a crash in MLIR's C++ still gives an error message.

MLIR's readers and passes trust their input. Some programs, above all broken bytecode, crash the
process, and some make it run forever.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import gc
import math
import os
import signal
import stat
import sys
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from alpa.dialects import ir, parse, parse_file
from alpa.tools.interrupts import INTERRUPTED

_STANDARD_INPUT = 0
_MOST_BYTES = 1 << 31
"""Of a pipe or a device: no program is as large, and an endless one fills the memory."""
_MOST_SECONDS = 600
"""Until a pipe or a device ends."""
_SELDOM = 1000
"""Collections of middle-aged objects before all objects are looked through; Python's is 10."""
_SAME_SECONDS = 0.5
"""Between two signals of one Ctrl-C, at most."""
_SET_PARENT_DEATH_SIGNAL = 1
"""Linux' PR_SET_PDEATHSIG."""


def guard(name: str) -> None:
    """Continues in a new process; this one waits for it, and reports a signal that ends it.

    SIGINT and SIGTERM to this process are for the new one. If another signal ends this process,
    such as SIGKILL, the new one gets SIGTERM. Call `guard` first, while there are no threads. The
    exit status is that of the new process, 130 if SIGINT has ended it, or 1. The new process seldom
    goes through all of its objects for garbage, and not at its end.
    """
    this = os.getpid()
    with warnings.catch_warnings():
        # JAX warns about threads, but has none before it uses a device.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        child = os.fork()
    if child == 0:
        _end_with(this)
        signal.signal(signal.SIGINT, _Interrupts().hear)
        # Python's last collection takes 0.7 s after planning gpt-39b, and the system frees the
        # memory anyway. What is registered later, such as Ray's end, runs before.
        atexit.register(gc.freeze)
        # One such collection takes 0.5 s of the report behind gpt-oss.
        gc.set_threshold(*gc.get_threshold()[:2], _SELDOM)
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(child, number))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGINT:
        code = INTERRUPTED
    if code < 0:
        number = signal.Signals(-code)
        print(f"{name}: error: {end_by_signal(number)}", file=sys.stderr, flush=True)
        code = 1
    os._exit(code)


def _end_with(parent: int) -> None:
    """Makes the system send SIGTERM to this process when its parent ends."""
    if ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM)) != 0:
        raise OSError("this system cannot end a command together with its first process")
    if os.getppid() != parent:  # It has ended before.
        os._exit(1)


class _Interrupts:
    """SIGINT in the new process. A terminal sends it to both processes, and the other one passes it
    on, so the second one within a moment is the same."""

    def __init__(self) -> None:
        self._last = -math.inf

    def hear(self, *_: object) -> None:
        """Raises KeyboardInterrupt, once for each Ctrl-C."""
        before, self._last = self._last, time.monotonic()
        if self._last - before > _SAME_SECONDS:
            raise KeyboardInterrupt


def end_by_signal(number: signal.Signals) -> str:
    """Why a signal has ended a process that reads a program or runs passes."""
    if number is signal.SIGALRM:
        return "MLIR's reader did not finish; the program is broken"
    if number is signal.SIGTERM:
        return "terminated"
    if number is signal.SIGKILL:
        return "the system has ended this process (SIGKILL); it may have needed too much memory"
    return (
        f"MLIR's C++ has crashed ({number.name}), and nothing was written. If the program is "
        "bytecode or was changed by hand, it is broken in a way that MLIR does not detect; "
        "otherwise a pass fails on it, and --print-ir-after-all shows which"
    )


def read_input(file: str | int) -> bytes:
    """The bytes of a file or, by its number, of an open one, which stays open.

    Raises:
        OSError: it cannot be read. An input that is no regular file ends neither within
            `_MOST_BYTES` nor within `_MOST_SECONDS`.
    """
    with open(file, "rb", closefd=isinstance(file, str)) as stream:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            return stream.read()
        with _ending_in_time():
            data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        reason = f"it does not end within {_MOST_BYTES >> 30} GiB; write it to a file first"
        raise OSError(errno.EFBIG, reason)
    return data


@contextmanager
def _ending_in_time() -> Generator[None]:
    """Raises OSError if reading takes longer than `_MOST_SECONDS`."""

    def give_up(*_: object) -> None:
        reason = f"it does not end within {_MOST_SECONDS} s; write it to a file first"
        raise OSError(errno.ETIMEDOUT, reason)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def parse_within(file: str, context: ir.Context | None = None) -> ir.Module:
    """Parses and verifies a module from a file, text or bytecode; `-` is standard input.

    Raises:
        OSError: it cannot be read; MLIR's own message gives no reason.
        ir.MLIRError: it does not parse or verify.
    """
    if file == "-" or not Path(file).is_file():
        data = read_input(_STANDARD_INPUT if file == "-" else file)
        with parsing(len(data)):
            return parse(data, context)
    with open(file, "rb") as stream:  # MLIR's own message gives no reason.
        size = os.fstat(stream.fileno()).st_size
    with parsing(size):
        return parse_file(file, context)


@contextmanager
def parsing(size: int) -> Generator[None]:
    """Ends the process by SIGALRM, which `guard` explains, if MLIR takes too long for so many
    bytes: some broken programs keep its reader busy for ever.

    The largest programs take less than a second; constants are read at more than 10 MB/s.
    """
    signal.alarm(60 + size // 10_000_000)
    try:
        yield
    finally:
        signal.alarm(0)
