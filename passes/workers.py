"""Runs independent calls in processes beside this one, such as solving one problem of many.

    with Workers(2) as workers:
        pending = [workers.share(partial(solve, problem)) for problem in problems]
        solutions = [one.result() for one in pending]

While this process waits for a result, it takes calls that are shared, too. The processes are fresh
interpreters that import what they are sent. `multiprocessing` would import the main module once
more in each, which runs a user's script again unless it is written for that.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, ParamSpec, TypeVar, cast

from alpa.passes.base import OptionError, PassError
from alpa.passes.solve.errors import SolverFailedError

P = ParamSpec("P")
T = TypeVar("T")

_WORTH = 10_000
"""Ops of a program, times the meshes that it is posed on, that are worth a process, which takes 0.3
to 1 s to start: 2,800 ops on 4 meshes take 2.8 s without processes and 2.4 s with one, 1,700 ops on
3 meshes 1.3 and 1.5 s."""
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
            count: the number of processes; `auto` is one for each of the machine's cores but that
                of this process.
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
            count = (os.cpu_count() or 1) - 1
        self.count = count if sys.executable else 0
        self._changed = threading.Condition()
        """notified when a call comes or ends; its lock is held to read or write what follows"""
        self._threads: list[threading.Thread] = []
        """each with a process of its own"""
        self._waiting: set[threading.Thread] = set()
        """the threads that wait for a call"""
        self._processes: list[subprocess.Popen[bytes]] | None = []
        """None at the end"""
        self._calls: dict[_Call[Any], None] = {}
        """those that have not ended, in their order"""
        self._busy: set[subprocess.Popen[bytes]] = set()
        """the processes that run a call"""
        self._dropped: set[subprocess.Popen[bytes]] = set()
        """those that `drop` has ended"""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes, in the middle of their work where an exception is on its way."""
        with self._changed:
            processes, self._processes = self._processes or [], None
            self._changed.notify_all()
        self.cancel()
        for process in processes:
            process.kill()
            process.wait()

    def cancel(self) -> None:
        """Cancels the calls that nobody has taken."""
        with self._changed:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def drop(self) -> None:
        """Ends the calls that have not ended, with the processes that run one; others stay."""
        while True:
            with self._changed:
                calls = list(self._calls)
                for process in self._busy - self._dropped:
                    process.kill()
                    self._dropped.add(process)
            for call in calls:
                call.cancel()
            # A call that was just starting its process is ended in the next round. One that this
            # thread has taken is not going on: an interrupt ended it before it ran.
            me = threading.current_thread()
            with self._changed:
                if all(call.done() or call.place is me for call in calls):
                    return
                self._changed.wait(timeout=0.05)

    @property
    def places(self) -> int:
        """How many shared calls run side by side while this process waits."""
        return self.count + 1

    def prepare(self, *modules: str, calls: int) -> None:
        """Has a process for each of so many calls but one import what they need: that takes as long
        as to build the first problem."""
        for _ in range(min(calls - 1, self.count)):
            self.submit(imported, *modules)

    def worth(self, ops: Iterable[object], meshes: int) -> Workers:
        """These if the ops of a program, posed on so many meshes, are worth a process, or if there
        are processes already; else none."""
        if not self.count or self._threads:
            return self
        enough = -(-_WORTH // max(1, meshes))
        return self if sum(1 for _ in islice(ops, enough)) == enough else Workers(0)

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Calls a function of a module, by name, with arguments that can be pickled.

        The result raises what the function raises, and ``SolverFailedError`` where a process ends.
        """
        call = partial(function, *args, **kwargs)
        return self._begin(_Call(self, call, call, is_shared=False))

    def share(
        self,
        call: Callable[[], T],
        *,
        here: Callable[[], T] | None = None,
        near: Future[Any] | None = None,
    ) -> Future[T]:
        """As `submit`, but this process may take the call while it waits for a result.

        Args:
            call: a function of a module with its arguments.
            here: the same, if this process has a shorter way.
            near: an earlier call, which left in its process what makes this one shorter. Others
                take it only if that one is busy, and has another such call to take next.
        """
        known = near if isinstance(near, _Call) and near.workers is self else None
        return self._begin(_Call(self, call, here or call, known, is_shared=True))

    def _begin(self, call: _Call[T]) -> Future[T]:
        if not self.count:
            call.take()
            call.run()
            return call
        with self._changed:
            self._calls[call] = None
            left = sum(call.place is None for call in self._calls)
            idle = len(self._waiting.intersection(self._threads))
            if idle < left and len(self._threads) < self.count:
                thread = threading.Thread(target=self._take_calls, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: Future[Any]) -> None:
        with self._changed:
            self._calls.pop(cast("_Call[Any]", call), None)
            self._changed.notify_all()

    def _next(self, *, first: _Call[Any] | None = None) -> _Call[Any] | None:
        """Takes a call that this thread may run, if there is one: one that is near to an earlier
        one of this thread, else `first`, else the oldest that is near to none, else the oldest."""
        me = threading.current_thread()
        is_mine = me in self._threads
        calls = [call for call in self._calls if call.is_ready and call.place is None]
        left = Counter(call.near for call in calls)

        def may_take(call: _Call[Any]) -> bool:
            if not (is_mine or call.is_shared):
                return False
            if call.near in (None, me):
                return True
            if call is first and call.near not in self._threads:
                return True  # The other thread, without a process, may not wait for calls again.
            return call.near not in self._waiting and left[call.near] > 1

        calls = [call for call in calls if may_take(call)]
        calls.sort(key=lambda call: (call.near is not me, call is not first, call.near is not None))
        taken = next((call for call in calls if call.take()), None)
        if taken is not None:
            self._changed.notify_all()  # This thread waits no more for those that are near to it.
        return taken

    def help(self, awaited: _Call[Any]) -> None:
        """Runs shared calls here until the awaited one has ended: those that are near to earlier
        ones of this thread, then the awaited one, then others."""
        while not awaited.done():
            with self._changed:
                call = self._next(first=awaited)
                if call is None and not awaited.done():
                    with self._is_waiting():
                        self._changed.wait()
            if call is not None:
                call.run()

    @contextmanager
    def _is_waiting(self) -> Generator[None]:
        """While this thread waits for a call."""
        me = threading.current_thread()
        self._waiting.add(me)
        try:
            yield
        finally:
            self._waiting.discard(me)

    def _take_calls(self) -> None:
        """In a thread that has a process of its own."""
        process: subprocess.Popen[bytes] | None = None
        while True:
            with self._changed:
                while (call := self._next()) is None:
                    if self._processes is None:
                        return
                    with self._is_waiting():
                        self._changed.wait()
            try:
                if process is None or process in self._dropped or process.poll() is not None:
                    process = self._start()
                call.set_result(self._answer(process, call.there))
            except BaseException as error:  # noqa: BLE001 - who waits gets it
                call.set_exception(error)

    def _answer(self, process: subprocess.Popen[bytes], call: Callable[[], Any]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        with self._changed:
            self._busy.add(process)
        try:
            pickle.dump(call, process.stdin)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError, pickle.UnpicklingError) as gone:
            if isinstance(gone, pickle.UnpicklingError):
                process.kill()  # It lives, and what it answers cannot be read any more.
            raise SolverFailedError(
                f"a process ended with status {process.wait()}; perhaps there was no memory left "
                "for it"
            ) from gone
        finally:
            with self._changed:
                self._busy.discard(process)
        if error is not None:
            raise error
        return result

    def _start(self) -> subprocess.Popen[bytes]:
        with self._changed:
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


class _Call(Future[T]):
    """A call that one thread takes: one with a process, or the one that waits."""

    def __init__(
        self,
        workers: Workers,
        there: Callable[[], T],
        here: Callable[[], T],
        near: _Call[Any] | None = None,
        *,
        is_shared: bool,
    ) -> None:
        """
        Args:
            workers: those that may run it.
            there: what a process is sent.
            here: the same for this process.
            near: a call on whose thread this one should run.
            is_shared: whether who waits may take it.
        """
        super().__init__()
        self.workers = workers
        self.there = there
        self.is_shared = is_shared
        self._here = here
        self._near = near
        self.place: threading.Thread | None = None
        """the thread that has taken it"""

    @property
    def near(self) -> threading.Thread | None:
        """The thread that should take it."""
        return None if self._near is None else self._near.place

    @property
    def is_ready(self) -> bool:
        """Whether it is known which thread should take it."""
        return self._near is None or self._near.running() or self._near.done()

    def take(self) -> bool:
        """Takes the call, unless it was taken or cancelled before."""
        if self.running() or self.done() or not self.set_running_or_notify_cancel():
            return False
        self.place = threading.current_thread()
        return True

    def run(self) -> None:
        """Runs the call here."""
        try:
            self.set_result(self._here())
        except _ANSWERS as error:
            self.set_exception(error)
        except BaseException as error:
            self.set_exception(error)  # It ends, whatever happens.
            raise

    def result(self, timeout: float | None = None) -> T:
        """The result, once there is one; until then, this process takes shared calls."""
        if self.is_shared:
            self.workers.help(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, as `result`."""
        if self.is_shared:
            self.workers.help(self)
        return super().exception(timeout)


@contextmanager
def workers_of(shared: Workers | None, count: int | Literal["auto"]) -> Generator[Workers]:
    """A pass's processes: those of a driver, or so many of its own.

    At the end, those of the driver have no call of the pass but those that they were just running,
    also where the pass refuses the program; any other exception ends these, too.

    Raises:
        OptionError: the number is negative.
    """
    if shared is None:
        with Workers(count) as own:
            yield own
        return
    try:
        yield shared
    except PassError:
        shared.cancel()
        raise
    except BaseException:
        shared.drop()
        raise
    shared.cancel()


def imported(*modules: str) -> None:
    """Imports modules."""
    for module in modules:
        importlib.import_module(module)


def serve(tasks: IO[bytes], results: IO[bytes]) -> None:
    """Runs calls one after the other until there are no more."""
    gc.disable()  # Calls make many objects and hardly a cycle.
    while True:
        try:
            call = pickle.load(tasks)
        except EOFError:
            return
        try:
            answer = (call(), None)
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
