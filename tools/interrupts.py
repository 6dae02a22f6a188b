"""What Ctrl-C does to a command: it ends with status 130, and a message instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

INTERRUPTED = 130
"""The exit status of a command that SIGINT ends, as shells have it: 128 and the signal's number."""


def until_interrupted(name: str, main: Callable[[], int | None]) -> int:
    """Runs a command; returns its exit status (None is 0), or that of an interrupted one.

    Processes and files that the command has open end with it, as after an error.
    """
    try:
        return main() or 0
    except KeyboardInterrupt:
        print(f"{name}: error: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
