"""The save that a process writes while it goes on computing: one at most, and no lost error.

An error of the writing thread is raised once, by the next call that waits for the save. If nothing
waits for it until the interpreter exits, the process reports it like an uncaught exception and ends
with status 1.

The interpreter waits for the thread before it ends. At that time Python starts no more threads, so
the thread uses none but tensorstore's.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.priority import lower_priority
from alpa.runtime.workers.errors import WorkerError

_log = logging.getLogger("alpa")


class Background:
    """The save in flight, if there is one."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """held by the call that saves: another thread's would delete its temporary folder"""
        self._lock = threading.RLock()
        self._save: tuple[Path, Future[None]] | None = None
        # One thread for all saves.
        self._thread = ThreadPoolExecutor(1, "alpa-save")
        atexit.register(self._at_exit)

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight."""
        save = self._save
        return save is not None and not save[1].done()

    def start(self, folder: Path, write: Callable[[], None]) -> None:
        """Writes a checkpoint in a thread, once the earlier save has succeeded."""

        def run() -> None:
            lower_priority()
            try:
                write()
            except BaseException as error:
                error.add_note(f"This happened in the background, while {folder} was saved.")
                raise

        with self._lock:
            self.wait()
            self._save = folder, self._thread.submit(run)

    def settle(self) -> None:
        """Waits until the save has ended, and leaves its error to later calls."""
        save = self._save
        if save is not None:
            concurrent.futures.wait([save[1]])

    def wait(self) -> None:
        """Waits for the save, and raises its error once.

        Raises:
            CheckpointError: the checkpoint cannot be written.
            WorkerError: a worker has failed.
        """
        with self._lock:
            # If a signal interrupts it, the save stays in flight.
            self.settle()
            save, self._save = self._save, None
        if save is not None:
            try:
                save[1].result()
            finally:
                # The error refers to this frame: without a reference to it from here, a caller who
                # drops the error frees the state at once.
                del save

    def recover(self) -> None:
        """Waits for the save like `wait`, but only logs that its workers were lost.

        For calls that continue from an earlier checkpoint after such a loss.
        """
        try:
            self.wait()
        except WorkerError as error:
            _log.error("%s\n%s", error, "\n".join(error.__notes__))

    def _at_exit(self) -> None:
        if self._save is None:
            return
        folder, future = self._save
        error = (
            future.exception()
            if future.done()
            else CheckpointError(f"{folder} is incomplete: the end of the save was not awaited")
        )
        if error is None:
            return
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        # The interpreter has chosen its exit status, and nothing milder than this changes it.
        os._exit(1)


@cache
def background() -> Background:
    """This process's save in flight."""
    return Background()
