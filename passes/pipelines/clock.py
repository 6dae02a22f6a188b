"""Where the time goes: seconds of phases by name."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from alpa.passes.base import Show, quiet


class Clock:
    """Adds up the seconds of phases by name; `on_phase` hears when one begins."""

    def __init__(self, on_phase: Show = quiet) -> None:
        self.seconds: dict[str, float] = {}
        self.on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Generator[Show]:
        """One phase, also where it ends by an exception. Returns what hears how far it is."""
        self.on_phase(name)
        start = time.perf_counter()

        def show(what: str, done: int = 0, total: int = 0) -> None:
            self.on_phase(f"{name}: {what}", done, total)

        try:
            yield show
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
