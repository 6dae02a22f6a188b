"""When the values of a block live, for any order in which its ops run.

A visitor moves `now` on from op to op, and says of each result whether it is written to memory, or
whether ops that read it read something else instead: it is a view of that, or is computed from it
where it is needed. What is written lives until it is read for the last time, also through others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from alpa.dialects import ir


@dataclass(kw_only=True)
class Lives:
    """The lives of values as half-open intervals of time, `made` to `until`."""

    now: int = 0
    made: dict[ir.Value, int] = field(default_factory=dict)
    """when a value is written"""
    until: dict[ir.Value, int] = field(default_factory=dict)
    """the time after which a value, or what is computed from it where that is used, is not read"""
    base: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)
    """what a value that is not written is read from"""

    def write(self, value: ir.Value, start: int) -> None:
        """A value is written from `start` on."""
        self.made[value] = start
        self.until[value] = start + 1

    def see_through(self, value: ir.Value, base: Iterable[ir.Value]) -> None:
        """A value is not written: reading it reads `base`."""
        self.base[value] = tuple(base)
        self.until[value] = self.now + 1

    def read(self, values: Iterable[ir.Value]) -> None:
        """Values, and what they are read from, live until now."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                self.until[value] = self.now + 1
                waiting += self.base.get(value, ())

    def keep(self, *, made_before: int, read_after: int) -> None:
        """What a loop reads, by the time of its life so far, it reads until its end: now."""
        for value, start in self.made.items():
            if start < made_before and self.until[value] > read_after:
                self.until[value] = self.now + 1
