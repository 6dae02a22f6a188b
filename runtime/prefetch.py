"""Places batches on the meshes that read them, before their step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from alpa.runtime.option_checks import check_count


@runtime_checkable
class TakesBatches(Protocol):
    """A parallelised function, or a program that `load` returns."""

    def place_batch(self, batch: Any) -> Any:
        """Returns a batch with its arrays placed; arrays that are placed already stay."""
        ...


def prefetch(step: TakesBatches, batches: Iterable[Any], ahead: int = 2) -> Iterator[Any]:
    """Places batches ahead of the step that takes them, and yields them in order.

        for batch in alpa.runtime.prefetch(train_step, batches):
            state, loss = train_step(state, batch)

    Args:
        step: what takes the batches: a function that `alpa.parallelize` returned, or a program of
            `load`.
        batches: for a function, its argument that holds samples, any tree of arrays; a tuple of
            such arguments if there are several. For a program, dictionaries of whole batches by
            argument number.
        ahead: how many batches are on the devices besides the one taken last.

    A batch for which the function is not planned yet is yielded as it is. So the first call plans,
    and the batches after it are placed.

    Raises:
        TypeError: `step` or a batch is of another type.
        ValueError: `ahead` is negative, an array has the wrong type for the program, or it is
            unknown which arguments of the function hold samples.
    """
    given: Any = step
    if not isinstance(given, TakesBatches):
        raise TypeError(
            f"step is {step!r}, of type {type(step).__name__}; expected a function that "
            "alpa.parallelize returned, or a program of alpa.runtime.load"
        )
    check_count("ahead", ahead, 0)
    return _placed(step, iter(batches), ahead)


def _placed(step: TakesBatches, source: Iterator[Any], ahead: int) -> Iterator[Any]:
    waiting = deque(islice(source, ahead))
    while True:
        waiting.extend(islice(source, 1))
        if not waiting:
            return
        # A call since the last batch may have planned the step.
        waiting = deque(map(step.place_batch, waiting))
        yield waiting.popleft()
