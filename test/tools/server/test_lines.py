"""Lines are read whole, and too long ones are skipped without being held."""

from __future__ import annotations

import os
import threading
import tracemalloc

import pytest

from alpa.tools.server.lines import Lines, LineTooLongError, write_all


def lines_of(data: bytes, limit: int) -> list[bytes | None]:
    """All lines of a pipe; None stands for one that is too long."""
    reading, writing = os.pipe()
    writer = threading.Thread(target=lambda: (write_all(writing, data), os.close(writing)))
    writer.start()
    lines, found = Lines(reading, limit), list[bytes | None]()
    while True:
        try:
            line = lines.next()
        except LineTooLongError:
            found.append(None)
            continue
        if line is None:
            break
        found.append(line)
    assert lines.next() is None
    writer.join()
    os.close(reading)
    return found


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a\nbc\n", [b"a", b"bc"]),
        (b"a\nbc", [b"a", b"bc"]),
        (b"12345\n1\n", [b"12345", b"1"]),
        (b"123456\n1\n", [None, b"1"]),
        (b"1\n123456", [b"1", None]),
        (b"x" * 5_000_000 + b"\nabc\n", [None, b"abc"]),
        (b"x" * 5_000_000, [None]),
        (b"1\n" * 1_000_000, [b"1"] * 1_000_000),
    ],
)
def test_lines_up_to_five_bytes(data: bytes, expected: list[bytes | None]) -> None:
    assert lines_of(data, limit=5) == expected


def test_a_long_line_of_the_limit_is_one_line() -> None:
    line = b"x" * 3_000_000
    assert lines_of(line + b"\n1", limit=len(line)) == [line, b"1"]
    assert lines_of(line + b"\n1", limit=len(line) - 1) == [None, b"1"]


def test_what_is_too_long_is_not_held() -> None:
    data = b"x" * 60_000_000
    tracemalloc.start()
    assert lines_of(data, limit=1000) == [None]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
