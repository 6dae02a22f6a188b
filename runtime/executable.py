"""What a planned program is to its caller, whatever runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax

from alpa.dialects.attributes import Plan
from alpa.passes.plan.data import Program
from alpa.runtime.argument_checks import ArgumentChecks
from alpa.runtime.checkpoints.stored_array import StoredArray
from alpa.runtime.process_usage import ProcessUsage
from alpa.runtime.trace import Trace


class Stage(Protocol):
    """A compiled fragment."""

    def hlo_text(self) -> str:
        """The program after partitioning and optimisation."""
        ...

    def memory(self) -> Any:
        """XLA's account of its bytes per device."""
        ...


class Executable(ABC):
    """A planned program that can be called with the arguments of the original `@main`.

    Where the plan has B > 1 micro-batches, batch arguments are whole batches. Results are on the
    meshes, as the plan says, and can be fed back in as they are. An argument that the original
    program donates is donated here too: its array cannot be used again.
    """

    _trace: Trace | None = None
    """what is being recorded"""

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
        """Whether what runs it has failed or was closed, so that it has to be loaded again."""
        return False

    @abstractmethod
    def place(self, number: int, array: Any) -> Any:
        """Puts an argument of the original `@main` where the steps that take it read it.

        What comes back stands for the array in calls of this executable. Each micro-batch is on
        the devices of each mesh that reads it. Steps leave it as it is.

        Raises:
            ValueError: shape or dtype are not the program's, or steps overwrite the argument.
        """

    @abstractmethod
    def create(
        self, numbers: Sequence[int], function: Callable[[], Sequence[jax.Array]]
    ) -> list[Any]:
        """The arrays that a traceable function returns, made on the devices that a step wants them.

        The r-th is to be argument `numbers[r]` of the original `@main`, and comes back like a
        result of a step. No device or host ever holds more than its share.

        Raises:
            ValueError: shape or dtype are not the program's.
        """

    @abstractmethod
    def restore(self, numbers: Sequence[int], stored: Sequence[StoredArray]) -> list[Any]:
        """Stored arrays, each part read by the devices that a step wants it on.

        The r-th is to be argument `numbers[r]` of the original `@main`, as with `create`.

        Raises:
            CheckpointError: an array is not there, or damaged.
        """

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Runs one step. The results are `jax.Array`s.

        What the plan cuts between meshes comes back as one array, which may be a `CutArray`.

        Raises:
            TypeError, ValueError: number, shape or dtype of the arguments are not the program's.
            RuntimeError: an argument was deleted or donated, or one that is donated is given twice.
        """
        return self.run(self._checks.check(arguments))

    @abstractmethod
    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Runs one step, as a call does, with arguments that have been checked."""

    @property
    @abstractmethod
    def _checks(self) -> ArgumentChecks:
        """The checks of a call's arguments."""

    def usage(self) -> dict[str, ProcessUsage]:
        """What the processes that run it hold of their hosts: memory, files, threads.

        By name, the caller's own as `caller`; steps go on meanwhile.

        Raises:
            OSError: a host is not Linux.
            WorkerError: a worker has failed.
        """
        return {"caller": ProcessUsage.of()}

    @contextmanager
    def trace(self, path: str | Path | None = None) -> Generator[Trace]:
        """Records the steps that are called inside `with`, and writes them to a file at the end.

        The file is in Chrome's trace format (https://ui.perfetto.dev opens it). `Trace.table` says
        what of a step is computation, transfers and waiting. Each instruction is waited for.

        Raises:
            FileNotFoundError: there is no folder for the file.
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
