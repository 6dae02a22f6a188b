"""Memory that two processes of one host share, in segments that are used again and again.

The sender owns the segments and writes into one that is free. The receiver reads there, and frees
the segment by its first byte once nobody uses what it holds. A segment has no name in the file
system: its memory is gone with the last process that uses it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from itertools import count

import numpy as np

from alpa.runtime.workers.transport.base import TransportError
from alpa.runtime.workers.transport.host_memory import ALIGNMENT

_FREE, _USED = 0, 1
_BEGIN = ALIGNMENT
"""where the bytes of a message begin in a segment"""
_PAGE = mmap.PAGESIZE
_LOOSEST = 2
"""A message may lie in a segment that is so many times as large as it needs."""


class Segment:
    """A segment as one of the two processes sees it; `file` is the descriptor of its memory."""

    def __init__(self, file: int, size: int) -> None:
        # With its pages, where the system can: each would otherwise interrupt the first copy.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._bytes = np.frombuffer(mmap.mmap(file, size, flags=flags), np.uint8)
        self.size = size

    @property
    def is_free(self) -> bool:
        return self._bytes[0] == _FREE

    def use(self) -> np.ndarray:
        """Marks it as used, and returns the bytes for a message."""
        self._bytes[0] = _USED
        return self._bytes[_BEGIN:]

    def free(self) -> None:
        self._bytes[0] = _FREE

    def message(self) -> np.ndarray:
        """The bytes of the message in it. The segment is free once they and all views are gone."""
        held = _Held(self, self._bytes[_BEGIN:])
        weakref.finalize(held, self.free).atexit = False
        return np.asarray(held)


class _Held:
    """What keeps a segment from being free: the owner of an array's memory, for numpy."""

    def __init__(self, segment: Segment, held: np.ndarray) -> None:
        self._segment = segment  # and with it the mapping of its memory
        self.__array_interface__ = held.__array_interface__


class Pool:
    """A sender's segments for one peer.

    All of them have at most twice the bytes of what was in use at the worst time; if a message
    finds no segment of about its size, free ones are given up for a new one.
    """

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        """by number, the one that was used last at the end"""
        self._numbers = count()
        self._peak = 0

    def take(self, size: int) -> tuple[int, Segment, int | None, list[int]]:
        """A free segment for a message of so many bytes.

        Returns its number, the segment, the descriptor of its memory if it is new, for the caller
        to close, and the numbers of segments that were given up.

        Raises:
            TransportError: there is no memory for it.
        """
        size += _BEGIN
        fits = [
            (segment.size, number)
            for number, segment in self._segments.items()
            if size <= segment.size <= max(_LOOSEST * size, _PAGE) and segment.is_free
        ]
        if fits:
            _, number = min(fits)
            self._segments[number] = segment = self._segments.pop(number)
            return number, segment, None, []
        size = -(-size // _PAGE) * _PAGE
        given_up = list(self._given_up(size))
        number, file = next(self._numbers), _memory(size)
        self._segments[number] = segment = Segment(file, size)
        return number, segment, file, given_up

    def _given_up(self, size: int) -> Iterator[int]:
        """Gives up free segments until there is room for another; those used least recently."""
        total = sum(it.size for it in self._segments.values()) + size
        free = [number for number, it in self._segments.items() if it.is_free]
        self._peak = max(self._peak, total - sum(self._segments[it].size for it in free))
        for number in free:
            if total <= _LOOSEST * self._peak:
                return
            total -= self._segments.pop(number).size
            yield number


def _memory(size: int) -> int:
    """The descriptor of new memory."""
    file: int | None = None
    try:
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("alpa", os.MFD_CLOEXEC)
        else:
            file, path = tempfile.mkstemp(prefix="alpa-")
            os.unlink(path)
        if hasattr(os, "posix_fallocate"):
            # All of it now: a page that cannot be had later would end the process.
            os.posix_fallocate(file, 0, size)
        else:
            os.ftruncate(file, size)
    except OSError as error:
        if file is not None:
            os.close(file)
        raise TransportError(
            f"{size:,} bytes of memory for tiles cannot be had: {error}; take fewer or smaller "
            "micro-batches, or raise the limit that the error names"
        ) from error
    return file
