"""Finds the processes that hold the arrays of a state: this one, or the workers of a plan.

A state is a tree whose arrays may lie anywhere. An operation on all of them sends one request to
each of these processes (*keepers*).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import jax.numpy as jnp

from alpa.runtime.checkpoints.shards import (
    HostCopy,
    Write,
    copy_shards,
    shard_shape,
    write_copies,
    write_shards,
)
from alpa.runtime.checkpoints.stored_array import Shape
from alpa.runtime.cut_array import CutArray
from alpa.runtime.mesh_array import MeshArray

Answer = TypeVar("Answer")


class Copies(ABC):
    """Copies of arrays in the host memory of the processes that hold the arrays."""

    @abstractmethod
    def write(self, writes: Sequence[Write]) -> None:
        """Writes the copies to a checkpoint beside running steps, and frees them.

        Raises:
            CheckpointError: they cannot be written.
            WorkerError: a worker has failed.
        """

    @abstractmethod
    def drop(self) -> None:
        """Frees the copies, if they are not written."""


class Keeper(ABC):
    """Runs operations on arrays where they lie."""

    @abstractmethod
    def shard_shapes(self, arrays: Sequence[Any]) -> list[Shape]:
        """The shape of each array's shards."""

    @abstractmethod
    def write(self, arrays: Sequence[Any], writes: Sequence[Write]) -> None:
        """Writes arrays to a checkpoint, in all processes that have shards in parallel.

        Raises:
            CheckpointError: they cannot be written.
            RuntimeError: an array was deleted or donated, or the step that makes it has failed.
        """

    @abstractmethod
    def copy(self, arrays: Sequence[Any]) -> Copies:
        """Copies arrays to host memory, in all processes that have shards in parallel.

        Raises:
            RuntimeError: as for `write`.
        """

    @abstractmethod
    def are_finite(self, arrays: Sequence[Any]) -> list[bool]:
        """Whether all numbers of each array are finite."""


class CopiesHere(Copies):
    """Copies in this process."""

    def __init__(self, copies: Sequence[HostCopy]) -> None:
        self._copies = copies

    def write(self, writes: Sequence[Write]) -> None:
        write_copies(zip(self._copies, writes, strict=True))
        self.drop()

    def drop(self) -> None:
        self._copies = ()


class Here(Keeper):
    """This process, for arrays of JAX and numpy."""

    def shard_shapes(self, arrays: Sequence[Any]) -> list[Shape]:
        return [shard_shape(array) for array in arrays]

    def write(self, arrays: Sequence[Any], writes: Sequence[Write]) -> None:
        write_shards(zip(arrays, writes, strict=True))

    def copy(self, arrays: Sequence[Any]) -> Copies:
        return CopiesHere(copy_shards(arrays))

    def are_finite(self, arrays: Sequence[Any]) -> list[bool]:
        # Start all computations before waiting for the first.
        found = [
            jnp.isfinite(array).all() if jnp.issubdtype(array.dtype, jnp.inexact) else True
            for array in arrays
        ]
        return [bool(it) for it in found]


HERE = Here()


class KeptArray(MeshArray):
    """An array that a keeper in another process holds."""

    @property
    @abstractmethod
    def keeper(self) -> Keeper: ...


def pieces(array: Any) -> list[tuple[Shape, Any]]:
    """The arrays that an array consists of, each on one mesh, with their offsets."""
    if not isinstance(array, CutArray):
        return [((0,) * array.ndim, array)]
    starts = [[0] * array.ndim for _ in array.parts]
    for start, part in zip(starts, array.parts, strict=True):
        start[part.dim] = part.start
    return [(tuple(s), it) for s, it in zip(starts, array.parts.values(), strict=True)]


def ask(
    arrays: Sequence[Any], question: Callable[[Keeper, list[int]], Sequence[Answer]]
) -> list[Answer]:
    """Returns the answers of keepers for their arrays, in the order of the arrays.

    Calls `question` once per keeper, with the numbers of its arrays.
    """
    numbers: dict[Keeper, list[int]] = {}
    for number, array in enumerate(arrays):
        keeper = array.keeper if isinstance(array, KeptArray) else HERE
        numbers.setdefault(keeper, []).append(number)
    answers: dict[int, Answer] = {}
    for keeper, mine in numbers.items():
        answers.update(zip(mine, question(keeper, mine), strict=True))
    return [answers[number] for number in range(len(arrays))]


class AllCopies(Copies):
    """Copies of arrays, each in the host memory of its keeper."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._parts: list[tuple[Copies, list[int]]] = []

        def copy(keeper: Keeper, mine: list[int]) -> list[None]:
            self._parts.append((keeper.copy([arrays[i] for i in mine]), mine))
            return [None] * len(mine)

        with ExitStack() as undo:
            undo.callback(self.drop)
            ask(arrays, copy)
            undo.pop_all()

    def write(self, writes: Sequence[Write]) -> None:
        for copies, mine in self._parts:
            copies.write([writes[i] for i in mine])

    def drop(self) -> None:
        for copies, _ in self._parts:
            copies.drop()


def not_finite(arrays: Sequence[Any]) -> list[int]:
    """The numbers of the arrays that hold NaN or infinity, checked where they lie."""
    parts = [(number, part) for number, array in enumerate(arrays) for _, part in pieces(array)]
    flat = [part for _, part in parts]
    finite = ask(flat, lambda keeper, mine: keeper.are_finite([flat[i] for i in mine]))
    return sorted({number for (number, _), ok in zip(parts, finite, strict=True) if not ok})
