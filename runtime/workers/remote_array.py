"""The results of a step on Ray: arrays that stay on their meshes until they are read."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa.passes.plan.data import ProgramArgument
from alpa.runtime.argument_checks import ArgumentChecks, Placed
from alpa.runtime.checkpoints.shards import Write
from alpa.runtime.checkpoints.stored_array import Shape
from alpa.runtime.keepers import Copies, Keeper, KeptArray
from alpa.runtime.workers.errors import WorkerError
from alpa.runtime.workers.group import Call, WorkerGroup, wait_for
from alpa.runtime.workers.messages import ArrayId


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy of an array: the mesh that holds it, its value in the plan, and its name there."""

    mesh: str
    value: int
    key: ArrayId


@dataclass(frozen=True, kw_only=True)
class Workers(Keeper):
    """The workers of a group as a keeper; each has its shards of an array."""

    group: WorkerGroup

    def shard_shapes(self, arrays: Sequence[RemoteArray]) -> list[Shape]:
        return self._ask(arrays, "shard_shapes")

    def write(self, arrays: Sequence[RemoteArray], writes: Sequence[Write]) -> None:
        self._ask(arrays, "write", writes)

    def copy(self, arrays: Sequence[RemoteArray]) -> RemoteCopies:
        number, (mine, keys) = self.group.next_number(), _by_mesh(arrays)
        self.call(mine, "copy", number, items=[keys])
        return RemoteCopies(self, number, mine)

    def are_finite(self, arrays: Sequence[RemoteArray]) -> list[bool]:
        return self._ask(arrays, "are_finite")

    def call(
        self,
        mine: Mapping[str, list[int]],
        method: str,
        *arguments: Any,
        items: Sequence[Sequence[Any]],
    ) -> dict[str, Call]:
        """Calls the workers of all meshes in parallel, and waits for them.

        `mine` are the numbers of each mesh's arrays. `items` are further arguments, with an item
        for each array.
        """
        try:
            calls = {
                mesh: self.group.call(
                    mesh, method, *arguments, *([them[i] for i in numbers] for them in items)
                )
                for mesh, numbers in mine.items()
            }
            wait_for(calls.values(), "checkpoint_timeout_seconds")
        except WorkerError:
            # The caller deletes what they have written, and until they end they may write more.
            self.group.wait_until_ended()
            raise
        return calls

    def _ask(self, arrays: Sequence[RemoteArray], method: str, *others: Sequence[Any]) -> list[Any]:
        """Asks one mesh of each array; returns the first worker's answers.

        `others` are further arguments, an item for each array.
        """
        mine, keys = _by_mesh(arrays)
        calls = self.call(mine, method, items=[keys, *others])
        answers: dict[int, Any] = {}
        for mesh, numbers in mine.items():
            first = calls[mesh].wait()[0] or [None] * len(numbers)
            answers.update(zip(numbers, first, strict=True))
        return [answers[number] for number in range(len(arrays))]


class RemoteCopies(Copies):
    """Copies in the host memory of workers, under a number."""

    def __init__(self, workers: Workers, number: int, mine: Mapping[str, list[int]]) -> None:
        self._workers, self._number, self._mine = workers, number, mine

    def write(self, writes: Sequence[Write]) -> None:
        self._workers.call(self._mine, "write_copies", self._number, items=[writes])
        self._mine = {}

    def drop(self) -> None:
        for mesh in self._mine:
            with suppress(WorkerError):  # The workers have ended.
                self._workers.group.call(mesh, "drop_copies", self._number)


def _by_mesh(arrays: Sequence[RemoteArray]) -> tuple[dict[str, list[int]], list[ArrayId]]:
    """The numbers of the arrays of each mesh, and the names of the arrays there."""
    copies = [array.first_copy() for array in arrays]
    mine: dict[str, list[int]] = {}
    for number, copy in enumerate(copies):
        mine.setdefault(copy.mesh, []).append(number)
    return mine, [copy.key for copy in copies]


class RemoteArray(KeptArray):
    """An array in the workers of a plan; several meshes may hold a copy.

    A step in the same workers reads it where it lies. It is freed when it is collected, deleted or
    donated.
    """

    def __init__(
        self,
        group: WorkerGroup,
        call: Call,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        copies: Sequence[Copy],
        weak_type: bool = False,
    ) -> None:
        super().__init__(shape, dtype, weak_type)
        self._group, self._call, self._copies = group, call, tuple(copies)
        self._free = weakref.finalize(self, _release, group, self._copies)
        self._free.atexit = False

    def copy_on(self, group: WorkerGroup, mesh: str, value: int) -> Copy | None:
        """The copy that a mesh of the group can read as a value; the same value if possible."""
        copies = [it for it in self._copies if it.mesh == mesh and group is self._group]
        return next((it for it in copies if it.value == value), copies[0] if copies else None)

    @property
    def keeper(self) -> Keeper:
        return Workers(group=self._group)

    def first_copy(self) -> Copy:
        """The copy that is fetched.

        Raises:
            RuntimeError: the array was deleted or donated.
        """
        self.check_alive()
        return self._copies[0]

    def where(self) -> str:
        return f"in the workers of {self._meshes()}"

    def check_workers(self) -> None:
        self._group.check_alive()

    def is_deleted(self) -> bool:
        return not self._free.alive

    def delete(self) -> None:
        """Lets the workers free the array."""
        self._free()

    def is_ready(self) -> bool:
        """Whether the step that makes it has ended."""
        return self._call.is_done()

    def block_until_ready(self) -> RemoteArray:
        """Waits for the step that makes it.

        Raises:
            WorkerError: the step has failed.
        """
        self.check_alive()
        self._call.wait()
        return self

    def fetch(self) -> np.ndarray:
        self.block_until_ready()
        first = self._copies[0]
        whole = np.empty(self.shape, self.dtype)
        for shards in self._group.call(first.mesh, "fetch", first.key).wait():
            for at, part in shards:
                whole[at] = part
        return whole

    def _meshes(self) -> str:
        return " and ".join(dict.fromkeys(copy.mesh for copy in self._copies))

    def __repr__(self) -> str:
        return f"RemoteArray({self.dtype}{list(self.shape)} on {self._meshes()})"


class PlacedArgument(Placed):
    """An argument placed on the meshes before its step; freed when it is collected."""

    def __init__(
        self, owner: ArgumentChecks, number: int, group: WorkerGroup, copies: Sequence[Copy]
    ) -> None:
        super().__init__(owner, number)
        self._copies = tuple(copies)
        weakref.finalize(self, _release, group, self._copies).atexit = False

    def copy_for(self, argument: ProgramArgument) -> Copy:
        """The copy for an argument of the planned @main."""
        return next(copy for copy in self._copies if copy.value == argument.value)


def _release(group: WorkerGroup, copies: Sequence[Copy]) -> None:
    """Marks copies as free; the next call tells the workers. This can run at any point of any code,
    where it must not call Ray."""
    for copy in copies:
        group.garbage[copy.mesh].append(copy.key)
