"""Shows what takes its time: one line of a terminal, with its seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

Show = Callable[[str], None]
"""Hears what begins."""

_TICK = 0.2  # seconds between two lines
_CLEAR = "\r\x1b[K"


def quiet(what: str) -> None:
    """Shows nothing."""


@contextmanager
def progress(first: str = "begin") -> Generator[Show]:
    """Returns a function that shows what begins, and the seconds since the start of `with`.

    The line is gone at the end. If standard error is no terminal, nothing is shown.
    """
    if not sys.stderr.isatty():
        yield quiet
        return
    start, done = time.perf_counter(), threading.Event()
    now = [first]

    def show() -> None:
        line = f"{_CLEAR}{now[0]}: {time.perf_counter() - start:.1f} s"
        sys.stderr.write(line)
        sys.stderr.flush()

    def begin(what: str) -> None:
        now[0] = what
        show()

    def keep_showing() -> None:
        while not done.wait(_TICK):
            show()

    thread = threading.Thread(target=keep_showing, daemon=True)
    thread.start()
    try:
        yield begin
    finally:
        done.set()
        thread.join()
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()
