"""Output that the command line tools share."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager


def markdown_row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_header(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return f"{markdown_row(columns)}\n{markdown_row(['---'] * len(columns))}"


@contextmanager
def until_the_reader_goes() -> Generator[None]:
    """Ends the block quietly when the reader of standard output has gone, as `head` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Otherwise Python would raise again for the rest of the buffer when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
