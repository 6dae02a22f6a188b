"""A wait with a deadline that says for what it waits."""

from __future__ import annotations

import logging
import time

from alpa.runtime.progress import Show

_log = logging.getLogger(__name__)

_LONG = 30.0
"""Seconds after which the log says what is waited for, again and again."""


class Waiting:
    """A wait of some seconds. `show` hears for what; without it, the log does not either."""

    def __init__(self, seconds: float, show: Show | None) -> None:
        self.seconds, self._show = seconds, show
        self._begin = time.monotonic()
        self._said = self._begin
        self._shown = ""

    @property
    def left(self) -> float:
        """The seconds until the deadline, 0 behind it."""
        return max(0.0, self._begin + self.seconds - time.monotonic())

    @property
    def tick(self) -> float:
        """The seconds until there is something to say, or the deadline."""
        return self.left if self._show is None else min(self.left, _LONG)

    def say(self, what: str, done: int = 0, total: int = 0) -> None:
        """Says for what this waits, such as `1 worker to start: mesh_0 on host 0`, and how many of
        all have ended."""
        if self._show is None:
            return
        text = f"waiting for {what}"
        if text != self._shown:
            self._shown = text
            self._show(text, done, total)
        now = time.monotonic()
        if now - self._said >= _LONG:
            self._said = now
            _log.warning("%s: %.0f s of at most %g", text, now - self._begin, self.seconds)
