"""Shows what takes its time in one line, with its seconds and those that are left.

A terminal shows the line while the work runs, and nothing is left of it. A notebook shows it with
each message, once the work has taken a second, and its seconds stay. Files and pipes get nothing.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from alpa.passes.base import Show, quiet

__all__ = ["Show", "progress", "quiet"]

_TICK = 0.2  # seconds between two lines
_SHORT = 0.5  # seconds that need no estimate
_PATIENCE = 1.0  # seconds of work that a notebook does not show
_CLEAR = "\r\x1b[K"


@contextmanager
def progress(first: str = "begin") -> Generator[Show]:
    """Returns a function that shows what begins, and the seconds since the start of `with`."""
    if sys.stderr.isatty():
        with _on_terminal(first) as show:
            yield show
    elif (display := _notebook_display()) is not None:
        with _in_notebook(first, display) as show:
            yield show
    else:
        yield quiet


class _Line:
    """What is being done, its seconds until now, and an estimate of those that are left."""

    def __init__(self, first: str) -> None:
        self._begin = self._since = self._last = time.perf_counter()
        self._what = first
        self._done = self._total = self._first = 0

    def tell(self, what: str, done: int, total: int) -> None:
        """Takes a message, as `Show`."""
        now = time.perf_counter()
        if total != self._total or done < self._done:  # Another thing is counted.
            self._since, self._first = now, done
        if done != self._done:
            self._last = now
        self._what, self._done, self._total = what, done, total

    @property
    def seconds(self) -> float:
        """Since the line was made."""
        return time.perf_counter() - self._begin

    def __str__(self) -> str:
        now = time.perf_counter()
        text = f"{self._what}: {self.seconds:.1f} s"
        finished = self._done - self._first
        if finished <= 0:
            return text
        each = (self._last - self._since) / finished
        left = each * (self._total - self._done) - (now - self._last)
        return f"{text}, about {_rough(left)} left" if left > _SHORT else text


def _rough(seconds: float) -> str:
    """Whole seconds, or minutes: the estimate is no better."""
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"


@contextmanager
def _on_terminal(first: str) -> Generator[Show]:
    line, done = _Line(first), threading.Event()

    def draw() -> None:
        width = shutil.get_terminal_size().columns - 1  # A full line would wrap.
        sys.stderr.write(f"{_CLEAR}{str(line)[:width]}")
        sys.stderr.flush()

    def show(what: str, done: int = 0, total: int = 0) -> None:
        line.tell(what, done, total)
        draw()

    def keep_drawing() -> None:
        while not done.wait(_TICK):
            draw()

    thread = threading.Thread(target=keep_drawing, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        done.set()
        thread.join()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


@contextmanager
def _in_notebook(first: str, display: Any) -> Generator[Show]:
    line, output = _Line(first), None

    def show(what: str, done: int = 0, total: int = 0) -> None:
        nonlocal output
        line.tell(what, done, total)
        data = {"text/plain": str(line)}
        if output is not None:
            output.update(data, raw=True)
        elif line.seconds > _PATIENCE:
            output = display(data, raw=True, display_id=True)

    try:
        yield show
    finally:
        if output is not None:
            show(first)


def _notebook_display() -> Any | None:
    """The function that makes an output of the running cell; None if this is no notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if not hasattr(shell, "kernel"):
        return None
    return importlib.import_module("IPython.display").display
