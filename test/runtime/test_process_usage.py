"""A process's resources are counted when it takes and releases them."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import alpa.runtime
from alpa.runtime.process_usage import ProcessUsage

MIB = 1 << 20


def test_files_sockets_and_threads_are_counted(tmp_path: Path) -> None:
    before = ProcessUsage.of()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    with ExitStack() as stack:
        stack.enter_context((tmp_path / "file").open("w"))
        for it in socket.socketpair():
            stack.enter_context(it)
        thread.start()
        during = ProcessUsage.of()
        end.set()
        thread.join()
    assert during.open_files == before.open_files + 3
    assert during.sockets == before.sockets + 2
    assert during.threads == before.threads + 1
    assert ProcessUsage.of().open_files == before.open_files


def test_memory_is_counted_where_it_is_written() -> None:
    before = ProcessUsage.of()
    array = np.ones(64 * MIB, np.uint8)
    during = ProcessUsage.of()
    assert 60 * MIB < during.own_bytes - before.own_bytes < 80 * MIB
    assert during.resident_bytes >= during.shared_out_bytes >= during.own_bytes
    del array
    assert ProcessUsage.of().own_bytes < during.own_bytes - 60 * MIB


def test_another_process() -> None:
    code = """
        import sys
        a = bytearray(64 << 20)
        sum(range(10**7))
        print(flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        usage = ProcessUsage.of(child.pid)
        child.communicate()
    assert 64 * MIB < usage.own_bytes < 128 * MIB
    assert usage.threads == 1
    assert usage.sockets == 0
    assert usage.processor_seconds > 0
    with pytest.raises(FileNotFoundError):
        ProcessUsage.of(child.pid)


def test_a_local_plan_runs_in_this_process(moves: str) -> None:
    (usage,) = alpa.runtime.load(moves).usage().items()
    assert usage[0] == "caller"
    assert usage[1].resident_bytes > 50 * MIB
