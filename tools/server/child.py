"""Forked processes that send bytes to the process that has started them."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from alpa.tools.interrupts import INTERRUPTED

_GRACE_SECONDS = 2.0
"""Until an interrupted process is killed. In Python it ends at once; MLIR's C++ may take long."""
_POLL_SECONDS = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Child:
    """A process, and the end of a pipe on which it sends."""

    pid: int
    file: int

    @classmethod
    def start(cls, work: Callable[[int], None]) -> Child:
        """Runs a function in a new process, with the pipe's other end, and ends the process.

        Its exit status is 0, 130 after an interrupt, or 1 after another exception, whose traceback
        it prints. Call this only while no thread of Python's or MLIR's runs: a fork keeps this one
        alone. OpenBLAS, which numpy imports, ends its threads before a fork.

        Raises:
            OSError: the system gives no process.
        """
        reading, writing = os.pipe()
        # Python ignores what is raised while it forks, and a fork takes long.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(reading)
            os.close(writing)
            raise
        if pid == 0:
            with _Ending():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.close(reading)
                work(writing)
        os.close(writing)
        child = cls(pid, reading)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # Raises for signals since then.
        except BaseException:
            child.end()
            raise
        return child

    def wait(self) -> int:
        """Waits for the end. Returns the exit status; that of a signal is its number, negative."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.file)
        return os.waitstatus_to_exitcode(status)

    def interrupt(self) -> None:
        """Asks the process to end."""
        os.kill(self.pid, signal.SIGINT)

    def end(self, grace: float = _GRACE_SECONDS) -> None:
        """Interrupts the process, and kills it if it has not ended after so many seconds.

        An interrupt of this process kills the other one at once.
        """
        until = time.monotonic() + grace
        try:
            self.interrupt()
            while time.monotonic() < until and not self._has_ended():
                time.sleep(_POLL_SECONDS)
        finally:
            os.kill(self.pid, signal.SIGKILL)  # Does nothing to a process that has ended.
            self.wait()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Ending:
    """Ends the process at the end of a block, before what the process was forked from unwinds."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            os._exit(INTERRUPTED)
        if error is not None:
            traceback.print_exception(error)
        os._exit(0 if error is None else 1)
