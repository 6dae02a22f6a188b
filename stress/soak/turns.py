"""Checks whether steps have become slower: an old run and a fresh one alternate on one machine.

Times at the beginning and at the end of a run do not compare well, because shared machines change
their speed by a third within minutes. A fresh run that pauses while the old one runs, and the other
way round, sees the same machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from alpa.runtime import WorkerError
from alpa.runtime.planning import PlanningError
from stress.soak.samples import usage
from stress.soak.training import SoakError, Training, started

_END_SECONDS = 60
"""the time for a fresh run to stop its workers"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The times of a run in one turn. `step_seconds` is the median of its steps.
    `processor_seconds` is the processor time of all its processes per step, with saving and
    evaluation."""

    step_seconds: float
    processor_seconds: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """A turn of the old run and one of the fresh run next to it."""

    old: Turn
    fresh: Turn


class Runner:
    """A run that advances in turns, without processes that this one starts later."""

    def __init__(self, training: Training, running: Iterator[tuple[int, float]]) -> None:
        """`running` are the training's steps, some of which may be over."""
        self._training = training
        self._running = running
        self._processes = usage(training.executable).keys()

    def turn(self) -> Turn:
        """Runs as many steps as there are between two checkpoints."""
        steps = self._training.save_every
        before = usage(self._training.executable)
        seconds = [next(self._running)[1] for _ in range(steps)]
        after = usage(self._training.executable)
        used = [
            after[name].processor_seconds - before[name].processor_seconds
            for name in self._processes & before.keys() & after.keys()
        ]
        return Turn(step_seconds=float(np.median(seconds)), processor_seconds=sum(used) / steps)


def rounds(old: Runner, options: argparse.Namespace, number: int) -> Iterator[Round]:
    """Starts a fresh run with the options of the old one, and alternates both for so many rounds.

    Each run has one turn before, which does not count. The order alternates, so that a trend within
    a round favours neither.

    Raises:
        SoakError: one of the two cannot continue.
        WorkerError: a worker of the old one has failed.
    """
    with _fresh(options) as fresh:
        old.turn()
        _answer(fresh)
        for at in range(number):
            if at % 2:
                first = old.turn()
                yield Round(old=first, fresh=_answer(fresh))
            else:
                first = _answer(fresh)
                yield Round(old=old.turn(), fresh=first)


@contextmanager
def _fresh(options: argparse.Namespace) -> Generator[Connection]:
    """A process that runs a turn of a fresh run on request."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()  # which ends it
        process.join(_END_SECONDS)
        process.kill()  # if it still runs


def _answer(fresh: Connection) -> Turn:
    try:
        fresh.send(None)
        answer: Turn | str = fresh.recv()
    except (BrokenPipeError, EOFError) as gone:
        raise SoakError("the fresh run has ended, perhaps for lack of memory") from gone
    if isinstance(answer, str):
        raise SoakError(f"the fresh run: {answer}")
    return answer


def _serve(asked: Connection, options: argparse.Namespace) -> None:
    """The process of the fresh run, with its own folder of checkpoints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Interrupts go to the waiting process.
    options.checkpoints = None
    try:
        with started(options) as training:
            running = training.steps()
            next(running)  # which waits for the workers to compile
            runner = Runner(training, running)
            while True:
                asked.recv()
                asked.send(runner.turn())
    except (PlanningError, SoakError, WorkerError) as error:
        asked.send(str(error))
    except (BrokenPipeError, EOFError):
        return  # the caller has ended
