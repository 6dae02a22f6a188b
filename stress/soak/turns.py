"""Whether steps have become slower: an old run and a fresh one take turns on the same machine.

Times at the beginning of a run and at its end say little of the run, since machines change their
pace, by a third within minutes where others share them. A fresh run that stands still while the old
one takes its turn, and the other way round, meets the same.
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
"""for a fresh run to stop its workers"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """`step_seconds` is the median of its steps, `processor_seconds` what all processes of the run
    took for each step, saving and evaluation included."""

    step_seconds: float
    processor_seconds: float


@dataclass(frozen=True, kw_only=True)
class Round:
    """A turn of the old run and one of the fresh run next to it."""

    old: Turn
    fresh: Turn


class Runner:
    """A run that goes on by turns. Processes that this one starts later are not the run's."""

    def __init__(self, training: Training, running: Iterator[tuple[int, float]]) -> None:
        """`running` are the training's steps, of which some may be over."""
        self._training = training
        self._running = running
        self._processes = usage(training.executable).keys()

    def turn(self) -> Turn:
        """As many steps as there are from one checkpoint to the next."""
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
    """Starts a fresh run with the options of the old one, and has both take so many turns.

    Each has one before, which does not count. Who is first changes from round to round, so that
    what becomes slower or faster in the course of it favours neither.

    Raises:
        SoakError: one of the two cannot go on.
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
    """A process that takes a turn of a fresh run when it is asked to."""
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
        raise SoakError("the fresh run has ended, perhaps for want of memory") from gone
    if isinstance(answer, str):
        raise SoakError(f"the fresh run: {answer}")
    return answer


def _serve(asked: Connection, options: argparse.Namespace) -> None:
    """The process of the fresh run, with checkpoints in a folder of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # An interrupt is for the process that waits.
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
        return  # nobody asks any more
