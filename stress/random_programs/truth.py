"""Labels: what is known by construction about a step with several micro-batches.

Each feature of a random program has its own label; the program has the largest of them.
"""

from __future__ import annotations

from enum import IntEnum


class Truth(IntEnum):
    """Whether micro-batches compute what the whole batch computes, the largest label last."""

    EXACT = 0
    NOISE = 1
    """exact, with numbers drawn for the samples of each micro-batch"""
    EITHER = 2
    """exact, but perhaps not provable: it is equal or refused"""
    MIXED = 3
    """samples of several micro-batches are mixed: it must be refused"""

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Truth.EXACT: "exact",
    Truth.NOISE: "exact with noise per micro-batch",
    Truth.EITHER: "exact, may be refused",
    Truth.MIXED: "mixed",
}
