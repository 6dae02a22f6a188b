"""Ctrl-C in a step: which arrays are lost with it, and what it must not cut in two.

An interrupted step may have used the buffers of what was donated to it, and its results do not
reach the caller. Its arguments that still have their buffers are as before.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from alpa.runtime.mesh_array import LOST, MeshArray


class Lost:
    """The arrays that were donated to steps that were interrupted."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def has(self, array: Any) -> bool:
        """Whether an array was donated to such a step, which has used its buffers."""
        if isinstance(array, MeshArray):
            return array.is_lost
        known = self._known.get(id(array))
        return known is not None and known() is array

    @contextmanager
    def step(self, arguments: Iterable[Any]) -> Generator[None]:
        """Runs a step inside; if it is interrupted, remembers which of its arguments are lost.

        Before it, none of them was deleted.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            gone = [it for it in arguments if hasattr(it, "is_deleted") and it.is_deleted()]
            for array in gone:
                self._add(array)
            if gone:
                interrupt.add_note(f"The state {LOST}.")
            raise

    def _add(self, array: Any) -> None:
        if isinstance(array, MeshArray):
            array.is_lost = True
            return
        key = id(array)
        self._known[key] = weakref.ref(array, lambda _: self._known.pop(key, None))


@contextmanager
def held_back() -> Generator[None]:
    """Holds Ctrl-C back until the end of `with`, which must be near.

    Only the main thread gets it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)


def imported(name: str) -> Any:
    """Imports a module. Ctrl-C is held back: the modules of an import cut in two stay broken."""
    with held_back():
        return import_module(name)
