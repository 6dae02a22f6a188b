"""Numbers and rows as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_RANGES = 3


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of ascending numbers that follow one another."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def ranges_text(numbers: Iterable[int]) -> str:
    """`0-3,5`; more than a few ranges are cut short."""
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in runs(numbers)]
    return ",".join(texts[:_RANGES]) + (",..." if len(texts) > _RANGES else "")


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """The lines of a table; the columns in `left` are aligned to the left."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count_text(number: int, noun: str, plural: str = "") -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def percent(share: float) -> str:
    """A share as people read it: 3.2%, 41%."""
    if 0 < share < 5e-4:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"
