"""The page: its sections in order, with styles, scripts and Bokeh inline."""

from __future__ import annotations

from importlib.resources import files

import bokeh
from bokeh.resources import Resources

from alpa.runtime.report.communication import communication
from alpa.runtime.report.content import Content
from alpa.runtime.report.markup import Html, element, html, joined
from alpa.runtime.report.measured import measured
from alpa.runtime.report.memory import memory
from alpa.runtime.report.search import search
from alpa.runtime.report.shardings import shardings
from alpa.runtime.report.stages import stages
from alpa.runtime.report.summary import summary
from alpa.runtime.report.timeline import timeline

_SECTIONS = {
    "limits": ("Limits", summary),
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
    title = f"Plan of {content.name} for {content.numbers.cluster or 'a cluster'}"
    links = (
        element("a", text, href=f"#{identifier}") for identifier, (text, _) in sections.items()
    )
    button = element(
        "button",
        "Dark",
        type="button",
        id="theme",
        aria_pressed="false",
        aria_label="Dark theme",
    )
    skip = element("a", "Skip to the report", href="#limits", class_="skip")
    heading = element("h1", title)
    head = element("header", skip, heading, element("nav", *links, button, aria_label="Sections"))
    main = element("main", *(make(content) for _, make in sections.values()))
    foot = element("footer", f"Written by Alpa, drawn with Bokeh {bokeh.__version__}.")
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{html(title)}</title>",
            f"<style>{_asset('page.css')}</style>",
            joined(_scripts()),
            "</head>",
            f"<body>{head}{main}{foot}",
            f"<script>{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _scripts() -> list[Html]:
    """Bokeh's core, without widgets and tables."""
    resources = Resources(mode="inline", components=["bokeh"])
    return [Html(f"<script>{text}</script>") for text in resources.js_raw]


def _asset(name: str) -> str:
    return files("alpa.runtime.report").joinpath(name).read_text(encoding="utf-8")
