"""Signals that come while a process is forked."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
import signal
import sys
import time

from alpa.tools.server.child import Child

number = signal.Signals[sys.argv[1]]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
os.register_at_fork(
    before=lambda: os.kill(os.getpid(), number),
    after_in_parent=lambda: [i for i in range(1000)],
)
try:
    Child.start(lambda _: time.sleep(600))
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_during_the_fork_is_heard(number: str) -> None:
    """The child holds standard output, which `run` reads to its end."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, number], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (7, "")
