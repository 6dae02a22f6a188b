"""Runs seeds in separate processes, so that an abort or a hang costs one seed only."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO

from stress.random_programs.check import Outcome

SEEDS_PER_PROCESS = 40
"""Then a fresh process starts, because the compiled programs in JAX and XLA add up."""
SHOWN = 3
"""The last lines of an ended process that are shown."""


def outcomes(
    seeds: Sequence[int], *, jobs: int, timeout: float, minutes: float | None, widen: bool
) -> Iterator[Outcome]:
    """Yields the outcome of each seed as it is known; omits seeds after `minutes`.

    `timeout` is the limit of one program in seconds.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with ThreadPoolExecutor(jobs) as pool:
        workers = [Worker(timeout, widen) for _ in range(jobs)]
        free = list(workers)
        lock = threading.Lock()

        def run(seed: int) -> Outcome | None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            with lock:
                worker = free.pop()
            outcome = worker.run(seed)
            with lock:
                free.append(worker)
            return outcome

        try:
            futures = [pool.submit(run, seed) for seed in seeds]
            for future in as_completed(futures):
                outcome = future.result()
                if outcome is not None:
                    yield outcome
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()


class Worker:
    """One process at a time, started when there is a seed for it."""

    def __init__(self, timeout: float, widen: bool) -> None:
        self._timeout, self._widen = timeout, widen
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None
        self._served = 0

    def run(self, seed: int) -> Outcome:
        start = time.monotonic()
        if self._served == SEEDS_PER_PROCESS:
            self.close()
        process = self._process or self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        timer = threading.Timer(self._timeout, process.kill)
        timer.start()
        line = process.stdout.readline()
        hung = not timer.is_alive()
        timer.cancel()
        self._served += 1
        if line and not hung:
            return Outcome(**json.loads(line))
        return Outcome(
            seed=seed,
            kind="traceback",
            reason=f"no end within {self._timeout:g} s" if hung else self._last_words(),
            seconds=time.monotonic() - start,
        )

    def start(self) -> subprocess.Popen[str]:
        """Starts a process that reads seeds and writes outcomes, a line each."""
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - for `close`
        command = [sys.executable, "-m", "stress.random_programs.worker"]
        self._process = subprocess.Popen(
            [*command, "--widen"] if self._widen else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._served = 0
        return self._process

    def _last_words(self) -> str:
        """How the process ended, and its last lines."""
        assert self._process is not None
        assert self._said is not None
        status = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        self.close()
        return " / ".join([f"the process ended with status {status}", *lines[-SHOWN:]])

    def close(self) -> None:
        """Ends the process; the next seed starts another one."""
        if self._process is None or self._said is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                with suppress(BrokenPipeError):  # a seed that the process has not read
                    stream.close()
        self._process = self._said = None
