"""The frame of a page: heading, links to the sections, the theme's button, styles and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from alpa.runtime.report.markup import Html, element, html, joined


def document(
    title: str, sections: Mapping[str, tuple[str, Html]], foot: str, scripts: Sequence[str] = ()
) -> str:
    """The whole page as text.

    Args:
        title: of the page.
        sections: by their `id`, each with the words of the link to it.
        foot: a line at the end.
        scripts: that the page runs first.
    """
    links = (
        element("a", words, href=f"#{identifier}") for identifier, (words, _) in sections.items()
    )
    button = element(
        "button",
        "Dark",
        type="button",
        id="theme",
        aria_pressed="false",
        aria_label="Dark theme",
    )
    skip = element("a", "Skip to the report", href="#main", class_="skip")
    heading = element("h1", title)
    head = element("header", skip, heading, element("nav", *links, button, aria_label="Sections"))
    main = element("main", *(it for _, it in sections.values()), id="main")
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
            joined(Html(f"<script>{text}</script>") for text in scripts),
            "</head>",
            f"<body>{head}{main}{element('footer', foot)}",
            f"<script>{_asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _asset(name: str) -> str:
    return files("alpa.runtime.report").joinpath(name).read_text(encoding="utf-8")
