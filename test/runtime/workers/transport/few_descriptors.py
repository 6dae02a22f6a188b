"""A worker whose descriptors are all taken by a flood while it waits for its peer."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parent))

from pairs import connect, exchange, group, opened

from alpa.runtime.workers.transport import listener
from stress.strangers.attacks import target_of

# In a process of its own: this one has no descriptors for it.
_FLOOD = """
import socket, sys, time
held = []
while True:
    try:
        it = socket.socket()
        it.settimeout(1)
        it.connect(("127.0.0.1", int(sys.argv[1])))
        held.append(it)
    except OSError:
        time.sleep(0.01)
    if len(held) > 300:
        held.pop(0).close()
    time.sleep(0.001)
"""
_LEFT = 24
"""descriptors: for the connections of both workers, and fewer than strangers may have"""


class _NoDescriptor(logging.Handler):
    """Waits until a listener says that it has none for a connection."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.is_said = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if os.strerror(errno.EMFILE) in record.getMessage():
            self.is_said.set()


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    none_left, log = _NoDescriptor(), logging.getLogger(listener.__name__)
    log.addHandler(none_left)
    log.setLevel(logging.DEBUG)
    both = opened("tcp", group(seconds=60.0))
    before = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + _LEFT, hard))
    (_, port) = target_of(both[0].address["tcp"])
    with subprocess.Popen([sys.executable, "-c", _FLOOD, str(port)]) as flood:
        try:
            if not none_left.is_said.wait(timeout=60):
                raise RuntimeError("the flood has not taken the descriptors")
            connect(both)
            exchange(*both)
        finally:
            flood.kill()
    for it in both:
        it.close()
    sys.stdout.write("all messages arrived\n")


if __name__ == "__main__":
    main()
