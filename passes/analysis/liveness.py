"""The live ranges of a block's values, for any order of its ops.

A visitor advances `now` from op to op. It says of each result whether it is written to memory. A
result that is not written is a view of other values, or is recomputed from them where it is used;
its readers read these values instead. A written value lives until its last read, also through
others.
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
    """the time after which no op reads a value, directly or through values that are not written"""
    base: dict[ir.Value, tuple[ir.Value, ...]] = field(default_factory=dict)
    """the values that are read instead of one that is not written"""
    _started: dict[ir.Value, ir.Value] = field(default_factory=dict)
    """the operands of what has started and not ended, by its results"""

    def write(self, value: ir.Value, start: int) -> None:
        """A value is written from `start` on."""
        self.made[value] = start
        self.until[value] = start + 1

    def see_through(self, value: ir.Value, base: Iterable[ir.Value]) -> None:
        """A value is not written: reading it reads `base`."""
        self.base[value] = tuple(base)
        self.until[value] = self.now + 1

    def end_with(self, result: ir.Value, operand: ir.Value) -> None:
        """What starts now ends when its result is first read; its operand lives until then."""
        self._started[result] = operand

    def read(self, values: Iterable[ir.Value]) -> None:
        """Values, and those that are read instead of them, live until now."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                self.until[value] = self.now + 1
                waiting += self.base.get(value, ())
                if value in self._started:
                    waiting.append(self._started.pop(value))

    def sources(self, values: Iterable[ir.Value]) -> set[ir.Value]:
        """The values that are read instead of these."""
        waiting, seen = list(values), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value not in seen:
                seen.add(value)
                waiting += self.base.get(value, ())
        return {value for value in seen if value not in self.base}

    def keep(self, *, made_before: int, read_after: int) -> None:
        """Values made before a loop that it reads live until its end, which is now."""
        for value, start in self.made.items():
            if start < made_before and self.until[value] > read_after:
                self.until[value] = self.now + 1
