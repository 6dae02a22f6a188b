"""Lines of a file descriptor, with a limit on their length."""

from __future__ import annotations

import os

_CHUNK = 1 << 20


class LineTooLongError(Exception):
    """A line is longer than the limit."""


class Lines:
    """Reads lines one by one, and holds what has been read after the last one."""

    def __init__(self, file: int, limit: int) -> None:
        """Reads nothing yet; `limit` is the largest number of bytes of a line."""
        self._file = file
        self._limit = limit
        self._held = bytearray()

    def next(self) -> bytes | None:
        """The next line without its line end, or None at the end of the input.

        Raises:
            LineTooLongError: the line exceeds the limit. It is skipped, and at most the limit and
                one chunk of it were in memory.
        """
        is_skipped, searched = False, 0
        while (end := self._held.find(b"\n", searched)) < 0:
            if len(self._held) > self._limit:
                is_skipped = True
                self._held.clear()
            end = searched = len(self._held)
            chunk = os.read(self._file, _CHUNK)
            if not chunk:
                if not (self._held or is_skipped):
                    return None
                break
            self._held += chunk
        line = bytes(self._held[:end])
        del self._held[: end + 1]
        if is_skipped or len(line) > self._limit:
            raise LineTooLongError
        return line


def write_all(file: int, data: bytes) -> None:
    """Writes all bytes.

    Raises:
        ConnectionError: the reader has gone.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
