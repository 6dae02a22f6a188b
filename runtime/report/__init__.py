"""The report of a plan: one HTML page that needs no network.

`content.py` collects the data, each other file makes one section of the page, and `page.py` puts
them together. Bokeh draws the figures; it is imported only when a page is written.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alpa.runtime.report.content import Content


class ReportError(RuntimeError):
    """A report cannot be written. The message says what to do."""


def check_can_draw() -> None:
    """Raises ReportError without Bokeh, which draws the figures."""
    if find_spec("bokeh") is None:
        raise ReportError(
            "a report needs bokeh, which is not installed; run pip install 'alpa-mlir[report]'"
        )


def write_report(path: str | Path, content: Content) -> None:
    """Writes the page.

    Raises:
        ReportError: Bokeh is not installed.
        OSError: the file cannot be written.
    """
    check_can_draw()
    from alpa.runtime.report.page import page  # noqa: PLC0415 - it needs Bokeh

    Path(path).write_text(page(content), encoding="utf-8")
