"""Reads small text files that people write."""

from __future__ import annotations

import errno
from pathlib import Path

_MOST = 1 << 24
"""Bytes. A device has no end."""


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read, or has more than 16 MiB.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(path, "rb") as file:
        data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise OSError(errno.EFBIG, f"it does not end within {_MOST >> 20} MiB")
    return data.decode()
