"""The page: its sections in order, with styles, scripts and Bokeh inline."""

from __future__ import annotations

import bokeh
from bokeh.resources import Resources

from alpa.runtime.report.communication import communication
from alpa.runtime.report.comparison import forced
from alpa.runtime.report.content import Content
from alpa.runtime.report.document import document
from alpa.runtime.report.measured import measured
from alpa.runtime.report.memory import memory
from alpa.runtime.report.search import search
from alpa.runtime.report.shardings import shardings
from alpa.runtime.report.stages import stages
from alpa.runtime.report.summary import summary
from alpa.runtime.report.timeline import timeline

_SECTIONS = {
    "limits": ("Limits", summary),
    "forced": ("Forced", forced),
    "stages": ("Stages", stages),
    "timeline": ("Timeline", timeline),
    "measured": ("Measured", measured),
    "shardings": ("Shardings", shardings),
    "memory": ("Memory", memory),
    "communication": ("Communication", communication),
    "search": ("Search", search),
}


def page(content: Content) -> str:
    """The whole page as text."""
    sections = dict(_SECTIONS)
    if content.measured is None:
        del sections["measured"]
    if content.forced is None:
        del sections["forced"]
    resources = Resources(mode="inline", components=["bokeh"])  # without widgets and tables
    return document(
        f"Plan of {content.name} for {content.numbers.cluster or 'a cluster'}",
        {name: (words, make(content)) for name, (words, make) in sections.items()},
        f"Written by Alpa, drawn with Bokeh {bokeh.__version__}.",
        resources.js_raw,
    )
