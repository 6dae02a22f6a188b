"""Places batches on the meshes that read them, before their step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from alpa.runtime.option_checks import check_count

if TYPE_CHECKING:
    from alpa.runtime.executable import Executable


def prefetch(
    step: Executable, batches: Iterable[Mapping[int, Any]], ahead: int = 2
) -> Iterator[dict[int, Any]]:
    """Places batches ahead of the step that takes them, and yields them in order.

    Args:
        step: the executable that takes the batches.
        batches: whole batches; arrays by argument number.
        ahead: how many batches are on the devices besides the one taken last.

    Raises:
        ValueError: `ahead` is negative, or an array has the wrong type for the program.
    """
    check_count("ahead", ahead, 0)
    source = iter(batches)
    placed: deque[dict[int, Any]] = deque()

    def fill(count: int) -> None:
        for batch in islice(source, count):
            placed.append({number: step.place(number, it) for number, it in batch.items()})

    fill(ahead)
    while True:
        fill(1)
        if not placed:
            return
        yield placed.popleft()
