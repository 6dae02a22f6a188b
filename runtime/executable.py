"""The interface of a loaded plan, for all executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from alpa.dialects.plan import Plan
from alpa.passes.plan.data import Program
from alpa.runtime.argument_checks import ArgumentChecks, Placed
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.process_usage import ProcessUsage
from alpa.runtime.trace import Trace


class Stage(Protocol):
    """A compiled fragment."""

    @property
    def read_from(self) -> Path | None:
        """The file that the executable was read from; None if it was compiled here."""
        ...

    def hlo_text(self) -> str:
        """The program after partitioning and optimisation."""
        ...

    def memory(self) -> Any:
        """XLA's memory statistics, in bytes per device."""
        ...


CLOSED = "the executable is closed; load the plan again"
"""The error of later calls."""


class Executable(ABC):
    """A planned program that can be called with the arguments of the original `@main`.

    With B > 1 micro-batches, batch arguments are whole batches. Results lie on the plan's meshes,
    and the next call accepts them there. An argument that the original program donates is donated
    here, too: its array cannot be used again. As a context manager, it closes itself at the end.
    """

    _trace: Trace | None = None
    """the trace that is being recorded"""
    weak_arguments: frozenset[int] = frozenset()
    weak_results: frozenset[int] = frozenset()
    """Numbers in the original `@main` of what has a weak type in JAX, as numbers of Python have.
    The arrays that the executable returns for them are weakly typed; StableHLO has no such type."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """The planned program as plain data."""

    @property
    def plan(self) -> Plan:
        """The plan's attributes: micro-batches, schedule, predictions."""
        return self.program.plan

    @property
    @abstractmethod
    def stages(self) -> Mapping[str, Stage]:
        """The compiled fragments by the names of their modules."""

    @property
    def is_stopped(self) -> bool:
        """Whether its executor has failed or was closed, so that it must be loaded again."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Ends it: later calls raise RuntimeError.

        The processes of its executor, if it has any, end, too, and their arrays are lost. Arrays in
        this process stay.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def place(self, number: int, array: Any) -> Any:
        """Places an argument of the original `@main` where steps read it.

        Returns an object that replaces the array in calls of this executable. Each micro-batch lies
        on the devices of each mesh that reads it. Steps do not change it.

        Raises:
            ValueError: shape or dtype are not the program's, or steps overwrite the argument.
        """

    def place_batch(self, batch: Mapping[int, Any]) -> dict[int, Any]:
        """Places arrays by argument number, as `place` does; placed ones stay."""
        return {
            number: array if isinstance(array, Placed) else self.place(number, array)
            for number, array in batch.items()
        }

    def has_placed(self, number: int, placed: Placed) -> bool:
        """Whether this executable placed an argument, as the one of this number."""
        return placed.owner is self._checks and placed.number == number

    @abstractmethod
    def create(
        self, numbers: Sequence[int], function: Callable[[], Sequence[jax.Array]]
    ) -> list[Any]:
        """Creates the arrays that a traceable function returns, where steps read them.

        The r-th array becomes argument `numbers[r]` of the original `@main`, and is returned like a
        result of a step. Each device creates its own shards.

        Raises:
            ValueError: shape or dtype are not the program's.
        """

    @abstractmethod
    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        """Restores stored arrays; each device reads its own part.

        The r-th array becomes argument `numbers[r]` of the original `@main`, as in `create`.

        Raises:
            CheckpointError: an array is missing or damaged.
        """

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Runs one step. The results are `jax.Array`s.

        A result that the plan splits between meshes is one array, which may be a `CutArray`.

        Raises:
            TypeError, ValueError: number, shape or dtype of the arguments are not the program's.
            RuntimeError: an argument was deleted or donated, or a donated one is given twice.
        """
        checked = self._checks.check(arguments)
        with self._checks.lost.step(checked):
            return self.run(checked)

    @abstractmethod
    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Runs one step like a call, with arguments that have been checked."""

    @property
    @abstractmethod
    def _checks(self) -> ArgumentChecks:
        """The checks of a call's arguments."""

    def usage(self) -> dict[str, ProcessUsage]:
        """Returns the memory, files and threads of the processes that run the plan.

        Keys are process names; the caller's is `caller`. Steps are not interrupted.

        Raises:
            OSError: a host is not Linux.
            WorkerError: a worker has failed.
        """
        return {"caller": ProcessUsage.of()}

    @contextmanager
    def trace(self, path: str | Path | None = None) -> Generator[Trace]:
        """Records the steps that are called inside `with`, and writes them to a file at the end.

        The file is in Chrome's trace format, which https://ui.perfetto.dev opens. `Trace.table`
        splits a step into computation, transfers and waiting. Traced steps wait for each
        instruction.

        Raises:
            FileNotFoundError: the folder of the file does not exist.
            RuntimeError: a trace is being recorded already.
        """
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no such folder")
        if self._trace is not None:
            raise RuntimeError("a trace is being recorded already; end its `with` first")
        trace = self._trace = Trace()
        try:
            yield trace
        finally:
            self._trace = None
            if path is not None:
                trace.write(path)
