"""Where the time goes: seconds of phases by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager


class Clock:
    """Adds up the seconds of phases by name; `on_phase` hears when one begins."""

    def __init__(self, on_phase: Callable[[str], None] = lambda _: None) -> None:
        self.seconds: dict[str, float] = {}
        self.on_phase = on_phase

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """One phase, also where it ends by an exception."""
        self.on_phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
