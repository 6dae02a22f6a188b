"""A worker whose descriptors are all taken by a flood while it waits for its peer."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[4]))
sys.path.insert(0, str(Path(__file__).parent))

from pairs import connect, exchange, group, opened

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


def _has_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return False
    return True


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    both = opened("tcp", group(seconds=60.0))
    before = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + _LEFT, hard))
    (_, port) = target_of(both[0].address["tcp"])
    with subprocess.Popen([sys.executable, "-c", _FLOOD, str(port)]) as flood:
        try:
            deadline = time.monotonic() + 60
            while _has_descriptors():
                if time.monotonic() > deadline:
                    raise RuntimeError("the flood has not taken the descriptors")
                time.sleep(0.001)
            connect(both)
            exchange(*both)
        finally:
            flood.kill()
    for it in both:
        it.close()
    sys.stdout.write("all messages arrived\n")


if __name__ == "__main__":
    main()
