"""The priority of the threads that write a checkpoint beside running steps."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

_LOWEST = 19
"""of Linux's priorities: beside a step on the same core, a writer gets a sixtieth of it"""
_LOW = 5
"""From this priority of the process on, the lowest would be too close, so writers are idle ones."""
_POOL = "ts_pool_worker"
"""the name of tensorstore's threads"""


def lower_priority() -> None:
    """Lets this thread, and tensorstore's that exist, run when others leave a core to them.

    Threads that tensorstore has started for another thread have that one's priority, and stay for
    the next checkpoint. Their low priority lasts until tensorstore ends them when they are idle.

    Ray starts its workers with priority 15, beside which the lowest still gets a third of a core.
    Linux's policy for idle work gets a twelfth. Beside processes of the usual priority it would get
    a three-hundredth, and a save might never end.
    """
    if sys.platform != "linux":
        return  # Elsewhere the priority is the process's, and steps would slow down.
    _lower(threading.get_native_id())
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended.
            if (thread / "comm").read_text().strip() == _POOL:
                _lower(int(thread.name))


def _lower(thread: int) -> None:
    if os.getpriority(os.PRIO_PROCESS, os.getpid()) >= _LOW:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.setpriority(os.PRIO_PROCESS, thread, _LOWEST)
