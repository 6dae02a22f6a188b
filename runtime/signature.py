"""Converts between the original program's arguments and results and those of the planned `@main`.

An argument of the original program can be several of the planned one: a copy per mesh that reads
it, or a slice per mesh that holds a part of it. The same is true of results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax.sharding import NamedSharding

from alpa.dialects.attributes import Slice
from alpa.passes.plan.data import Program, ProgramArgument, ProgramResult
from alpa.runtime.argument_checks import ArgumentChecks, Expected
from alpa.runtime.cut_array import CutArray, part_of
from alpa.runtime.dtypes import numpy_dtype

Result = TypeVar("Result")


class Signature:
    """Checks a call's arguments and splits them; combines its results."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.checks = ArgumentChecks(_expected(program))
        """of the original program's arguments"""

    def part(
        self, argument: ProgramArgument, array: Any, sharding: NamedSharding | None = None
    ) -> Any:
        """The part of a checked array that an argument of the planned @main takes.

        A slice that lies in this sharding is taken as it is.
        """
        part = argument.attributes.slice
        return array if part is None else part_of(array, part, sharding)

    def positions(self, number: int) -> list[int]:
        """The positions in the planned @main of an argument that can be placed before its step.

        Raises:
            ValueError: there is no such argument, or it is donated.
        """
        arguments = self._program.arguments
        positions = [i for i, argument in enumerate(arguments) if argument.number == number]
        if not positions:
            raise ValueError(f"the program has no argument {number}")
        if any(is_donated(arguments[i]) for i in positions):
            raise ValueError(
                f"argument {number} is donated to each step and cannot be placed ahead"
            )
        return positions

    def wanted(self, numbers: Sequence[int]) -> dict[str, list[int]]:
        """The positions in the planned @main of arguments of the original one, by mesh."""
        wanted: dict[str, list[int]] = {}
        for position, argument in enumerate(self._program.arguments):
            if argument.number in numbers:
                mesh = self._program.values[argument.value].mesh
                wanted.setdefault(mesh, []).append(position)
        return wanted

    def parts(
        self,
        numbers: Sequence[int],
        function: Callable[[], Sequence[Any]],
        positions: Sequence[int],
    ) -> list[Any]:
        """The parts that arguments of the planned @main take of the original arguments.

        Raises:
            ValueError: shape or dtype are not the program's.
        """
        given = dict(zip(numbers, function(), strict=True))
        given = {number: self.checks.check_one(number, array) for number, array in given.items()}
        arguments = [self._program.arguments[position] for position in positions]
        return [self.part(argument, given[argument.number]) for argument in arguments]

    def copies(self, results: Sequence[Result]) -> dict[tuple[int, Slice | None], list[Result]]:
        """Groups the planned @main's results that are the same part of the same original result."""
        return _copies(self._program.results, results)

    def created(
        self,
        numbers: Sequence[int],
        arrays: Mapping[int, Result],
        one: Callable[[list[Result]], Any],
    ) -> list[Any]:
        """Builds arguments of the original @main from arrays by their positions in the planned one.

        `one` makes an array from its copies.
        """
        arguments = [self._program.arguments[position] for position in arrays]
        copies = _copies(arguments, list(arrays.values()))
        joined = self.join({part: one(them) for part, them in copies.items()})
        by_number = dict(zip(sorted(numbers), joined, strict=True))
        return [by_number[number] for number in numbers]

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


def _expected(program: Program) -> dict[int, Expected]:
    """The arguments of the original program, by number: whole batches, all slices of an array."""
    rows: dict[int, int] = {}
    for argument in program.arguments:
        if (part := argument.attributes.slice) is not None:
            rows[argument.number] = max(rows.get(argument.number, 0), part.stop)
    expected: dict[int, Expected] = {}
    for argument in program.arguments:
        value, batches = program.values[argument.value], program.num_micro_batches
        part, dim = argument.attributes.slice, batch_dim(argument)
        shape, words = list(value.shape), ""
        if part is not None:
            shape[part.dim] = rows[argument.number]
        if dim is not None and batches > 1:
            words = f", the whole batch: {batches} micro-batches of {shape[dim]} in dimension {dim}"
            shape[dim] *= batches
        earlier = expected.get(argument.number)
        expected[argument.number] = Expected(
            shape=tuple(shape),
            dtype=numpy_dtype(value.dtype),
            donated=is_donated(argument) or (earlier is not None and earlier.donated),
            batches=words,
        )
    return expected


def _copies(
    entries: Sequence[ProgramArgument | ProgramResult], arrays: Sequence[Result]
) -> dict[tuple[int, Slice | None], list[Result]]:
    copies: dict[tuple[int, Slice | None], list[Result]] = {}
    for entry, array in zip(entries, arrays, strict=True):
        copies.setdefault((entry.number, entry.attributes.slice), []).append(array)
    return copies


def batch_dim(argument: ProgramArgument) -> int | None:
    """The dimension along which an argument is split into micro-batches."""
    return argument.attributes.batch_dim if argument.attributes.role == "batch" else None


def is_donated(argument: ProgramArgument) -> bool:
    """Whether the caller donates the argument's array."""
    return argument.attributes.donor or argument.attributes.aliasing_output is not None
