"""Caches of what is known about types and attributes.

A type keeps its context alive, and the context all that was ever made in it: a megabyte for a small
program. So the caches are emptied when a new context is made and when a run of passes ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# One for each function that is decorated below, by import time; they only hold what can be found
# anew.
_CACHES: list[Callable[[], None]] = []


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """As `functools.cache`, until `forget`, and of the last 4096 arguments."""
    known = lru_cache(maxsize=4096)(function)
    _CACHES.append(known.cache_clear)
    return known  # pyright: ignore[reportReturnType] - its type has no parameters


def forget() -> None:
    """Empties all caches, so that no context is kept alive by them."""
    for clear in _CACHES:
        clear()
