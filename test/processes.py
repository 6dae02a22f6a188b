"""Processes that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def ended_on_failure(process: subprocess.Popen[str]) -> Generator[None]:
    """Kills a process and its session if the block fails; a test would wait for it without end."""
    try:
        yield
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
