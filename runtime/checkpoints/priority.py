"""The priority of the threads that write a checkpoint beside running steps."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

_LOWEST = 19
"""of Linux's priorities: beside a step on the same core, a writer gets a sixtieth of it"""
_POOL = "ts_pool_worker"
"""the name of tensorstore's threads"""


def lower_priority() -> None:
    """Lets this thread, and tensorstore's that exist, run when others leave a core to them.

    Threads that tensorstore has started for another thread have that one's priority, and stay for
    the next checkpoint. Their low priority lasts until tensorstore ends them when they are idle.
    """
    if sys.platform != "linux":
        return  # Elsewhere the priority is the process's, and steps would slow down.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
            if (thread / "comm").read_text().strip() == _POOL:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), _LOWEST)
