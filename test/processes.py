"""Processes that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ended_on_failure(process: subprocess.Popen[str]) -> Generator[None]:
    """Kills a process and its session if the block fails; a test would wait for it without end."""
    try:
        yield
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_until_asleep(session: int) -> None:
    """Waits until all processes of a session wait for something, such as a pipe that they read.

    Raises:
        TimeoutError: one of them still works after a minute.
    """
    end = time.monotonic() + 60
    while set(_states(session)) - {"S"}:
        if time.monotonic() > end:
            raise TimeoutError(f"session {session} works for more than a minute")
        time.sleep(0.01)


def _states(session: int) -> Generator[str]:
    """Of each process, as Linux names them (`man 5 proc_pid_stat`)."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # It has ended.
            continue
        if int(words[3]) == session:
            yield words[0]
