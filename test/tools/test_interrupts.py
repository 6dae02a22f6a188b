"""Ctrl-C ends each command with status 130, a message, and all of its processes. SIGKILL ends all
of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from test.processes import ended_on_failure, wait_until_asleep


def interrupted(words: list[str], fifo: Path, send: Callable[[int], None]) -> str:
    """What a command says that is interrupted while it reads a pipe that has no end."""
    os.mkfifo(fifo)
    with (
        subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
        ended_on_failure(process),
        fifo.open("w"),
    ):  # waits until the command opens it
        # Python sees no signal that comes right before a read begins, until that returns.
        wait_until_asleep(process.pid)
        send(process.pid)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out == ""
    with pytest.raises(ProcessLookupError):  # no process of its session is left
        os.killpg(process.pid, 0)
    return err


def to_one(pid: int) -> None:
    """As `kill -INT`, or a program that has started the command."""
    os.kill(pid, signal.SIGINT)


def to_all(pid: int) -> None:
    """As a terminal, which sends the signal to all processes of the command."""
    os.killpg(pid, signal.SIGINT)


@pytest.mark.parametrize("send", [to_one, to_all])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alpa-opt", "alpa.tools.alpa_opt"),
        ("alpa-plan", "alpa.tools.alpa_plan --cluster cpu:1x1"),
    ],
)
def test_a_command(name: str, words: str, send: Callable[[int], None], tmp_path: Path) -> None:
    fifo = tmp_path / "program.mlir"
    said = interrupted([*words.split(), str(fifo)], fifo, send)
    assert said == f"{name}: error: interrupted\n"


def test_a_tool_with_a_process_of_its_own(tmp_path: Path) -> None:
    fifo = tmp_path / "plan.mlir"
    said = interrupted(["alpa.tools.plan_table", str(fifo)], fifo, to_one)
    assert said == "plan_table: error: interrupted\n"


def test_calibration(tmp_path: Path) -> None:
    fifo = tmp_path / "cluster.toml"
    words = ["alpa.tools.alpa_calibrate", "--quick", "--check", str(fifo)]
    assert interrupted(words, fifo, to_one) == "alpa-calibrate: error: interrupted\n"


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """`subprocess.run(timeout=...)` kills a command, and then reads its output to the end."""
    fifo = tmp_path / "program.mlir"
    os.mkfifo(fifo)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "alpa.tools.alpa_opt", str(fifo)],
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as process,
        ended_on_failure(process),
        fifo.open("w"),  # waits until the command opens it
    ):
        process.kill()
        assert process.communicate(timeout=60) == (b"", None)


def test_a_guarded_command_collects_no_garbage_at_its_end():
    """That takes a while after a large plan. What is registered for the end still runs."""
    text = """
import atexit, gc, sys
from alpa.tools.guard import guard

class Ring:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("collected")

guard("test")
gc.disable()
ring = Ring()
del ring
atexit.register(print, "ended")
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "ended\n", "")
