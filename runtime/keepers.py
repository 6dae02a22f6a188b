"""Who has the arrays of a state: this process, or the workers of a plan.

A state is a tree whose arrays may lie anywhere. What is done with all of them at once, where they
lie, is asked of their keepers, one request each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp

from alpa.runtime.checkpoints.stored_array import Shape, Write, shard_shape, write_shards
from alpa.runtime.cut_array import CutArray
from alpa.runtime.mesh_array import MeshArray

Answer = TypeVar("Answer")


class Keeper(ABC):
    """Does for arrays that it has what is to be done where they lie."""

    @abstractmethod
    def shard_shapes(self, arrays: Sequence[Any]) -> list[Shape]:
        """The shape of each array's shards."""

    @abstractmethod
    def write(self, arrays: Sequence[Any], writes: Sequence[Write]) -> None:
        """Writes arrays to a checkpoint, all processes that have shards at once.

        Raises:
            CheckpointError: they cannot be written.
            RuntimeError: an array was deleted or donated, or the step that makes it has failed.
        """

    @abstractmethod
    def are_finite(self, arrays: Sequence[Any]) -> list[bool]:
        """Whether all numbers of each array are finite."""


class Here(Keeper):
    """This process, of arrays of jax and numpy."""

    def shard_shapes(self, arrays: Sequence[Any]) -> list[Shape]:
        return [shard_shape(array) for array in arrays]

    def write(self, arrays: Sequence[Any], writes: Sequence[Write]) -> None:
        write_shards(zip(arrays, writes, strict=True))

    def are_finite(self, arrays: Sequence[Any]) -> list[bool]:
        # All are under way before the first is looked at.
        found = [
            jnp.isfinite(array).all() if jnp.issubdtype(array.dtype, jnp.inexact) else True
            for array in arrays
        ]
        return [bool(it) for it in found]


HERE = Here()


class KeptArray(MeshArray):
    """An array that a keeper in another process has."""

    @property
    @abstractmethod
    def keeper(self) -> Keeper: ...


def pieces(array: Any) -> list[tuple[Shape, Any]]:
    """The arrays that an array is made of, each on one mesh, and where they begin in it."""
    if not isinstance(array, CutArray):
        return [((0,) * array.ndim, array)]
    starts = [[0] * array.ndim for _ in array.parts]
    for start, part in zip(starts, array.parts, strict=True):
        start[part.dim] = part.start
    return [(tuple(s), it) for s, it in zip(starts, array.parts.values(), strict=True)]


def ask(
    arrays: Sequence[Any], question: Callable[[Keeper, list[int]], Sequence[Answer]]
) -> list[Answer]:
    """What keepers answer about their arrays, in the order of the arrays.

    `question` is asked of each keeper once, with the numbers of the arrays that it has.
    """
    numbers: dict[Keeper, list[int]] = {}
    for number, array in enumerate(arrays):
        keeper = array.keeper if isinstance(array, KeptArray) else HERE
        numbers.setdefault(keeper, []).append(number)
    answers: dict[int, Answer] = {}
    for keeper, mine in numbers.items():
        answers.update(zip(mine, question(keeper, mine), strict=True))
    return [answers[number] for number in range(len(arrays))]


def not_finite(arrays: Sequence[Any]) -> list[int]:
    """The numbers of the arrays that hold NaN or infinity; looks at them where they lie."""
    parts = [(number, part) for number, array in enumerate(arrays) for _, part in pieces(array)]
    flat = [part for _, part in parts]
    finite = ask(flat, lambda keeper, mine: keeper.are_finite([flat[i] for i in mine]))
    return sorted({number for (number, _), ok in zip(parts, finite, strict=True) if not ok})
