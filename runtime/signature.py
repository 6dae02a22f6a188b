"""What the caller of a planned `@main` sees of it: the original program's arguments and results.

An argument of the original program can be several of the planned one: a copy per mesh that reads
it, or a slice per mesh that holds a part of it. So can a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from alpa.dialects.attributes import Slice
from alpa.passes.analysis.planned import Program, ProgramArgument
from alpa.runtime.cut_array import CutArray, part_of
from alpa.runtime.placement import numpy_dtype

Result = TypeVar("Result")


class Signature:
    """Checks a call's arguments and takes them apart; puts its results together."""

    def __init__(self, program: Program) -> None:
        self._program = program
        # How many rows there are in all of what arguments take slices of, by their numbers.
        self._rows: dict[int, int] = {}
        for argument in program.arguments:
            if (part := argument.attributes.slice) is not None:
                rows = self._rows.get(argument.number, 0)
                self._rows[argument.number] = max(rows, part.stop)

    def check_number(self, arguments: Sequence[Any]) -> None:
        """Raises TypeError unless there are as many as the original program takes."""
        count = 1 + max((a.number for a in self._program.arguments), default=-1)
        if len(arguments) != count:
            raise TypeError(f"the program takes {count} arguments, {len(arguments)} were given")

    def part(self, argument: ProgramArgument, given: Any) -> Any:
        """What an argument of the planned @main takes of what the caller gives.

        Raises:
            ValueError: shape or dtype are not the program's.
        """
        value = self._program.values[argument.value]
        batches, shape = self._program.num_micro_batches, list(value.shape)
        part, dim = argument.attributes.slice, batch_dim(argument)
        if part is not None:
            shape[part.dim] = self._rows[argument.number]
        if dim is not None:
            shape[dim] *= batches
        dtype = numpy_dtype(value.dtype)
        array = given if hasattr(given, "dtype") else np.asarray(given, dtype)
        if tuple(array.shape) != tuple(shape) or array.dtype != dtype:
            whole = (
                f", the whole batch: {batches} micro-batches of {value.shape[dim]} in dimension "
                f"{dim}"
                if dim is not None and batches > 1
                else ""
            )
            raise ValueError(
                f"argument {argument.number} is {array.dtype}{list(array.shape)}; "
                f"expected {dtype}{shape}{whole}"
            )
        return array if part is None else part_of(array, part)

    def positions(self, number: int) -> list[int]:
        """Where the planned @main takes an argument that can be placed ahead of its step.

        Raises:
            ValueError: there is no such argument, or the caller gives it away.
        """
        arguments = self._program.arguments
        positions = [i for i, argument in enumerate(arguments) if argument.number == number]
        if not positions:
            raise ValueError(f"the program has no argument {number}")
        if any(is_donated(arguments[i]) for i in positions):
            raise ValueError(f"argument {number} is donated to each step, and not placed ahead")
        return positions

    def copies(self, results: Sequence[Result]) -> dict[tuple[int, Slice | None], list[Result]]:
        """The results of the planned @main that are the same part of the same original one."""
        copies: dict[tuple[int, Slice | None], list[Result]] = {}
        for result, array in zip(self._program.results, results, strict=True):
            copies.setdefault((result.number, result.attributes.slice), []).append(array)
        return copies

    def join(self, parts: Mapping[tuple[int, Slice | None], Any]) -> tuple[Any, ...]:
        """One array for each result of the original program."""
        results: dict[int, Any] = {}
        cut: dict[int, dict[Slice, Any]] = {}
        for (number, part), array in parts.items():
            if part is None:
                results[number] = array
            else:
                cut.setdefault(number, {})[part] = array
        results |= {number: CutArray(slices) for number, slices in cut.items()}
        return tuple(results[number] for number in sorted(results))


def batch_dim(argument: ProgramArgument) -> int | None:
    """The dimension along which an argument is cut into micro-batches."""
    return argument.attributes.batch_dim if argument.attributes.role == "batch" else None


def is_donated(argument: ProgramArgument) -> bool:
    """Whether the caller gives the argument's array away."""
    return argument.attributes.donor or argument.attributes.aliasing_output is not None
