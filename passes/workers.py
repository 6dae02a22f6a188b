"""Runs independent calls in processes beside this one, such as solving one problem of many.

    with Workers(2) as workers:
        pending = [workers.submit(solve, problem) for problem in problems]
        solutions = [one.result() for one in pending]

The processes are fresh interpreters that import what they are sent. `multiprocessing` would import
the main module once more in each, which runs a user's script again unless it is written for that.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Literal, ParamSpec, TypeVar

from alpa.passes.base import OptionError
from alpa.passes.solve.errors import SolverFailedError

P = ParamSpec("P")
T = TypeVar("T")

_LARGE = 50_000
"""Variables of a sharding problem that is worth a process: about 0.3 s."""
_MANY = 5_000
"""Ops of a program whose problems are surely large."""
_ANSWERS = (ValueError, ArithmeticError, RuntimeError, TimeoutError, MemoryError)
"""Errors that a call may end with; any other is a bug, and ends the process with its traceback."""


class Workers:
    """So many processes, started when there is something to do. With 0, calls run here."""

    def __init__(
        self,
        count: int | Literal["auto"] = "auto",
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            count: the number of processes; `auto` is the number of the machine's cores, or 0 with
                one core.
            environment: variables of the processes' environment, beside this process's.
            log: the file that the processes' standard error is appended to; by default they share
                this process's.

        Raises:
            OptionError: the number is negative.
        """
        if count != "auto" and count < 0:
            raise OptionError(f"processes is {count}; at least 0")
        self._environment = {**os.environ, **(environment or {})}
        self._log = log
        if count == "auto":
            count = os.cpu_count() or 1
            count = count if count > 1 else 0
        self.count = count if sys.executable else 0
        self._threads = ThreadPoolExecutor(self.count) if self.count else None
        self._here = threading.local()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] | None = []
        """None at the end"""
        self._calls: dict[Future[Any], None] = {}
        """those that have not ended"""
        self._busy: set[subprocess.Popen[bytes]] = set()
        """the processes that run a call"""
        self._dropped: set[subprocess.Popen[bytes]] = set()
        """those that `drop` has ended"""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes, in the middle of their work where an exception is on its way."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            processes, self._processes = self._processes or [], None
        for process in processes:
            process.kill()
            process.wait()

    def drop(self) -> None:
        """Ends the calls that have not ended, with the processes that run one; others stay."""
        while True:
            with self._lock:
                calls = list(self._calls)
                for process in self._busy - self._dropped:
                    process.kill()
                    self._dropped.add(process)
            for call in calls:
                call.cancel()
            # A call that was just starting its process is ended in the next round.
            if not wait(calls, timeout=0.05).not_done:
                return

    def prepare(self, *modules: str, ops: int, calls: int) -> None:
        """Has a process for each of so many calls import what they need, if a program of so many
        ops is worth it: that takes as long as to build the first problem."""
        if ops >= _MANY:
            for _ in range(min(calls, self.count)):
                self.submit(imported, *modules)

    def worth(self, variables: int) -> Workers:
        """Where to submit a sharding problem of this size: a small one is solved here."""
        return self if variables >= _LARGE else Workers(0)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Calls a function of a module, by name, with arguments that can be pickled.

        The result raises what the function raises, and ``SolverFailedError`` where a process ends.
        """
        if self._threads is not None:
            begun = self._threads.submit(self._call, function, args, kwargs)
            with self._lock:
                self._calls[begun] = None
            begun.add_done_callback(self._ended)
            return begun
        done: Future[T] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except _ANSWERS as error:
            done.set_exception(error)
        return done

    def _ended(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.pop(call, None)

    def _call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """In a thread that has a process of its own."""
        process: subprocess.Popen[bytes] | None = getattr(self._here, "process", None)
        if process is None or process in self._dropped:
            process = self._here.process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            self._busy.add(process)
        try:
            pickle.dump((function, args, kwargs), process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as gone:
            del self._here.process  # The next call has a new one.
            if isinstance(gone, pickle.UnpicklingError):
                process.kill()  # It lives, and what it answers cannot be read any more.
            raise SolverFailedError(
                f"a process ended with status {process.wait()}; perhaps there was no memory left "
                "for it"
            ) from gone
        finally:
            with self._lock:
                self._busy.discard(process)
        if error is not None:
            raise error
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._processes is None:
                raise SolverFailedError("nobody waits for this solution any more")
            with nullcontext() if self._log is None else self._log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,  # An interrupt is for the process that waits.
                )
            self._processes.append(process)
            return process


@contextmanager
def workers_of(shared: Workers | None, count: int | Literal["auto"]) -> Generator[Workers]:
    """A pass's processes: those of a driver, or so many of its own.

    At the end, those of the driver have no call of the pass.

    Raises:
        OptionError: the number is negative.
    """
    if shared is None:
        with Workers(count) as own:
            yield own
        return
    try:
        yield shared
    finally:
        shared.drop()


def imported(*modules: str) -> None:
    """Imports modules."""
    for module in modules:
        importlib.import_module(module)


def serve(tasks: IO[bytes], results: IO[bytes]) -> None:
    """Runs calls one after the other until there are no more."""
    gc.disable()  # Calls make many objects and hardly a cycle.
    while True:
        try:
            function, args, kwargs = pickle.load(tasks)
        except EOFError:
            return
        try:
            answer = (function(*args, **kwargs), None)
        except _ANSWERS as error:
            answer = (None, error)
        pickle.dump(answer, results)
        results.flush()


def answers() -> IO[bytes]:
    """Where answers go, which no library prints to: that goes to where errors go."""
    sys.stdout.flush()
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return results


if __name__ == "__main__":
    serve(sys.stdin.buffer, answers())
