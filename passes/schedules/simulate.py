"""The one simulator of schedules: items in the lists of their resources, in time.

A resource (a mesh, or a link) runs its list in order, one item at a time. An item starts as soon as
the item before it in its list and all items that it needs have ended. Every prediction of seconds
uses this: the generators of schedules, the order of a step's instructions (`plan/instructions.py`),
and the seconds of a finished plan (`plan/step_time.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item", bound=Hashable)
Resource = TypeVar("Resource", bound=Hashable)


class Span(NamedTuple):
    """When an item runs, from the start of the step."""

    start: float
    end: float


class DeadlockError(ValueError):
    """Resources wait for one another; `waiting` has (resource, its next item, what it needs)."""

    def __init__(self, waiting: Sequence[tuple[Hashable, Hashable, Hashable]]) -> None:
        self.waiting = tuple(waiting)
        super().__init__(
            "no list can go on: "
            + "; ".join(f"{item} waits for {needed}" for _, item, needed in self.waiting)
        )


def simulate(
    lists: Mapping[Resource, Sequence[Item]],
    needs: Callable[[Item], Iterable[Item]],
    seconds: Callable[[Item], float],
) -> dict[Item, Span]:
    """When each item runs; the items of a resource are in the order of its list.

    Args:
        lists: of each resource; an item is in one list only, and there once.
        needs: the items that an item waits for, beside those before it in its list.
        seconds: how long an item takes.

    Raises:
        DeadlockError: some items never start, because they wait for one another or for an item that
            no list has.
    """
    spans: dict[Item, Span] = {}
    at = dict.fromkeys(lists, 0)
    free = dict.fromkeys(lists, 0.0)
    waiting: dict[Item, list[Resource]] = {}
    heads: dict[Resource, tuple[Item, Item]] = {}
    ready = deque(lists)
    while ready:
        resource = ready.popleft()
        items = lists[resource]
        heads.pop(resource, None)
        while at[resource] < len(items):
            item = items[at[resource]]
            start = free[resource]
            for needed in needs(item):
                span = spans.get(needed)
                if span is None:
                    waiting.setdefault(needed, []).append(resource)
                    heads[resource] = item, needed
                    break
                start = max(start, span.end)
            else:
                free[resource] = end = start + seconds(item)
                spans[item] = Span(start, end)
                at[resource] += 1
                ready.extend(waiting.pop(item, ()))
                continue
            break
    if heads:
        raise DeadlockError([(resource, *them) for resource, them in heads.items()])
    return spans
