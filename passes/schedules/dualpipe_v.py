"""DualPipeV: two chunks per mesh in V shape, forwards and backwards of both directions in pairs.

The order of DeepSeek's DualPipe (2024), folded in the middle as in its published variant for half
as many devices. Mesh d of S holds the stages d (here chunk 0) and 2S - 1 - d (chunk 1). In its
phases a mesh runs

1. 2 (S - d - 1) forwards of chunk 0,
2. d + 1 times a forward of each chunk,
3. S - d - 1 times a backward-input, its weight gradients, and a forward of chunk 1,
4. B - 2S + d + 1 times a forward of chunk 0 with a backward of chunk 1, then a forward of chunk 1
   with a backward of chunk 0,
5. S - d - 1 times a backward of chunk 1, then a forward of chunk 1 with a backward of chunk 0,
6. d + 1 times a backward of each chunk; in the second half weight gradients are left for later,
7. S - d - 1 times weight gradients that were left, and a backward-input of chunk 0,
8. the weight gradients that are left.

DualPipe overlaps the two of a pair, where one sends while the other computes. Here a mesh runs one
item at a time, the forward of a pair first.
"""

from __future__ import annotations

from collections import Counter, deque

from alpa.passes.schedules.verify import ScheduleError
from alpa.passes.schedules.work import Kind, Work, WorkLists


def dualpipe_v(meshes: int, batches: int) -> WorkLists:
    """DualPipeV.

    Raises:
        ScheduleError: there are fewer micro-batches than stages.
    """
    if batches < 2 * meshes:
        raise ScheduleError(
            f"dualpipe-v needs at least as many micro-batches as stages, {2 * meshes}, and there "
            f"are {batches}; take more micro-batches, or zb-v"
        )
    return WorkLists(lists=tuple(_Writer(meshes, d).write(batches) for d in range(meshes)))


class _Writer:
    """Writes the list of one mesh; micro-batches follow one another in each chunk and direction."""

    def __init__(self, meshes: int, d: int) -> None:
        self._meshes, self._d = meshes, d
        self._works: list[Work] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._left: deque[Work] = deque()
        """weight gradients for later"""

    def _stage(self, chunk: int) -> int:
        return 2 * self._meshes - 1 - self._d if chunk else self._d

    def _add(self, chunk: int, kind: Kind) -> None:
        direction = "forward" if kind == "forward" else "backward"
        m = self._next[chunk, direction]
        self._next[chunk, direction] += 1
        self._works.append(Work(self._stage(chunk), kind, m))
        if kind == "backward-input":
            self._left.append(Work(self._stage(chunk), "backward-weight", m))

    def _weights(self) -> None:
        if self._left:
            self._works.append(self._left.popleft())

    def _pair(self, chunk: int) -> None:
        self._add(chunk, "forward")
        self._add(1 - chunk, "backward")

    def write(self, batches: int) -> tuple[Work, ...]:
        d, behind = self._d, self._meshes - self._d - 1
        for _ in range(2 * behind):
            self._add(0, "forward")
        for _ in range(d + 1):
            self._add(0, "forward")
            self._add(1, "forward")
        for _ in range(behind):
            self._add(1, "backward-input")
            self._weights()
            self._add(1, "forward")
        for _ in range(batches - 2 * self._meshes + d + 1):
            self._pair(0)
            self._pair(1)
        for _ in range(behind):
            self._add(1, "backward")
            self._pair(1)
        for number in range(2 * (d + 1)):
            self._add(1 - number % 2, "backward" if number <= d else "backward-input")
        for _ in range(behind):
            self._weights()
            self._add(0, "backward-input")
        while self._left:
            self._weights()
        return tuple(self._works)
