"""Runs cases in a process that they may crash, and reports the outcome of each.

One process runs many cases in sequence, since starting one takes ten times as long as a case. If it
ends or hangs, the current case is to blame, and a new process continues with the next case.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

MEMORY = 16 << 30
"""of addresses; XLA and tensorstore reserve some GiB without using them"""
CASES_PER_PROCESS = 500
"""Then a fresh process starts, so that leftovers are found near their cause."""
_SAID = 4000
"""bytes from the end of a case's output that are kept"""


class Harm(Exception):  # noqa: N818 - not an error of the program that raises it
    """A case was answered, but something else is wrong; describes it in a word or two."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of a case.

    `problem` is None, or traceback, silent, hang, signal NAME, or another harm. `said` is the end
    of standard error, `refused` whether the case ended with an error.
    """

    problem: str | None
    said: str
    refused: bool = False


def answers(
    numbers: Sequence[int], run: Callable[[int], int], said: Path, seconds: float
) -> Iterator[tuple[int, Answer]]:
    """Yields the outcome of each case, in order; `run` returns its exit status or raises Harm.

    `said` is a file for the cases' standard error, `seconds` the limit for each.
    """
    left = list(numbers)
    while left:
        some, left = left[:CASES_PER_PROCESS], left[CASES_PER_PROCESS:]
        ours, theirs = socket.socketpair()
        pid = _fork(lambda them=some, ends=(ours, theirs): _serve(them, *ends, run, said), said)
        theirs.close()
        with ours, ours.makefile("r", encoding="utf-8") as lines:
            for at, number in enumerate(some):
                # The leftovers of a case can be inspected until the next one is requested.
                ours.sendall(b".")
                line = lines.readline() if select.select([ours], [], [], seconds)[0] else None
                if line:
                    yield number, Answer(**json.loads(line))
                    continue
                status = _end(pid) if line is None else _wait(pid)
                yield number, Answer(problem=problem(status, text(said)), said=text(said))
                left = some[at + 1 :] + left
                break
            else:
                _wait(pid)


def alone(run: Callable[[], int], said: Path, seconds: float) -> tuple[int | None, str]:
    """Runs a command in a process of its own; returns its status and its output.

    The status is None after a hang. A negative status is the number of a signal.
    """
    pid = _fork(run, said)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), text(said)
        time.sleep(0.002)
    return _end(pid), text(said)


def problem(status: int | None, said: str) -> str | None:
    """Describes what is wrong with the end of a case, if anything."""
    if status is None:
        return "hang"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    if "Traceback (most recent call last)" in said or status not in (0, 1):
        return "traceback"
    return "silent" if status == 1 and not said.strip() else None


def text(said: Path) -> str:
    """The end of a file."""
    if not said.exists():
        return ""
    return said.read_bytes()[-_SAID:].decode(errors="replace")


def _serve(
    numbers: Sequence[int],
    caller: socket.socket,
    to: socket.socket,
    run: Callable[[int], int],
    said: Path,
) -> int:
    """Runs cases on request, and writes a line for each."""
    caller.close()  # so that this process notices when the caller has ended
    with to.makefile("w", encoding="utf-8") as lines:
        for number in numbers:
            if not to.recv(1):
                break
            os.truncate(said, 0)
            harm = None
            try:
                status = run(number)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 2
            except Harm as found:
                status, harm = 0, str(found)
            except BaseException as error:  # noqa: BLE001 - any exception is a finding
                status = 2
                traceback.print_exception(error)
            sys.stderr.flush()
            words = text(said)
            answer = {"problem": harm or problem(status, words), "said": words}
            print(json.dumps(answer | {"refused": status != 0}), file=lines, flush=True)
    return 0


def _fork(run: Callable[[], int], said: Path) -> int:
    """Starts a process that shares this one's imports, in a session of its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(run, said)
    return pid


def _child(run: Callable[[], int], said: Path) -> NoReturn:
    status = 2
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # This process may write through other streams, as in tests.
        sys.stdout = open(1, "w")  # noqa: SIM115 - until the end
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115 - as Python's own
        faulthandler.enable()  # writes Python's stack at a signal to the file as well
        status = run()
        sys.stdout.flush()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 2
    except BaseException as error:
        traceback.print_exception(error)
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _end(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
