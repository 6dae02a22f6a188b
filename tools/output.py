"""What the command line tools share about where they write to."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def until_the_reader_goes() -> Generator[None]:
    """Ends the block quietly when who reads standard output has gone, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would raise once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
