"""A process's resources are counted when it takes and releases them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import alpa.runtime
from alpa.runtime.process_usage import ProcessUsage

MIB = 1 << 20


def test_files_sockets_and_threads_are_counted(tmp_path: Path) -> None:
    # A process of its own: threads of libraries open and close files in this one.
    code = """
        import socket, sys, threading
        from alpa.runtime.process_usage import ProcessUsage
        before = ProcessUsage.of()
        end = threading.Event()
        thread = threading.Thread(target=end.wait)
        with open(sys.argv[1], "w"):
            ends = socket.socketpair()
            thread.start()
            during = ProcessUsage.of()
            end.set()
            thread.join()
        for it in ends:
            it.close()
        assert during.open_files == before.open_files + 3, (before, during)
        assert during.sockets == before.sockets + 2, (before, during)
        assert during.threads == before.threads + 1, (before, during)
        after = ProcessUsage.of()
        assert after.open_files == before.open_files, (before, after)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")], check=True
    )


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
