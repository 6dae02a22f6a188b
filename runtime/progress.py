"""Shows in one line what takes its time, for how long, and about how much longer.

On a terminal the line disappears with the end of the work. In a notebook it is a widget, which
needs `ipywidgets`. Files and pipes get nothing. Drawn by rich.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator
from contextlib import contextmanager

from alpa.passes.base import Show, quiet

__all__ = ["Show", "progress", "quiet"]


@contextmanager
def progress(first: str = "begin") -> Generator[Show]:
    """Returns a function that shows what begins, and how much of it has ended."""
    notebook = _in_notebook()
    if not (notebook or sys.stderr.isatty()):
        yield quiet
        return
    from rich import progress as bars  # noqa: PLC0415 - only terminals and notebooks need it
    from rich.console import Console  # noqa: PLC0415 - only terminals and notebooks need it

    with bars.Progress(
        # What is shown may have brackets, which are not markup.
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=20),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True, force_jupyter=notebook),
        transient=True,
        redirect_stdout=False,  # Results may go into a file.
        speed_estimate_period=math.inf,  # One mesh or stage may take minutes.
    ) as display:
        task = display.add_task(first, total=None)

        def show(what: str, done: int = 0, total: int = 0) -> None:
            now = display.tasks[0]
            if (total or None) != now.total or done < now.completed:  # Another thing is counted.
                begin = now.start_time
                display.reset(task, completed=done)
                now.total, now.start_time = total or None, begin
            display.update(task, description=what, completed=done, refresh=True)

        yield show


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
