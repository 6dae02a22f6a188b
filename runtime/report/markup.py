"""Pieces of HTML: escaped text, tables, and numbers that say which entry of PLAN.json they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape

from alpa.passes.pipelines.diagnostics import Place, printable

_PARTS = 3
"""Of a path that are shown."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Cell = str | Html


def html(text: Cell) -> Html:
    """A text as HTML: names in a program come from others, and may hold markup."""
    return text if isinstance(text, Html) else Html(escape(printable(text)))


def joined(parts: Iterable[Cell], between: str = "") -> Html:
    """Texts in a row."""
    return Html(between.join(html(part) for part in parts))


def element(name: str, *content: Cell, **attributes: str) -> Html:
    """`element("p", "a < b", class_="note")`; underscores in attributes are dashes."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{named}>{joined(content)}</{name}>")


def number(entry: str, value: float | str | None, text: str) -> Html:
    """A number as people read it, with its value in PLAN.json and the entry that has it there.

    `entry` is a path such as `stages.0.forward_seconds`.
    """
    written = value if isinstance(value, str) else json.dumps(value)
    return element("data", text, value=written, data_entry=entry)


def table(
    header: Sequence[Cell],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str,
    left: Sequence[int] = (0,),
) -> Html:
    """A table that scrolls sideways if it is too wide; the columns in `left` hold words."""

    def row(cells: Sequence[Cell], name: str) -> Html:
        made = (
            element(name, cell, **_of_cell(name, number, left)) for number, cell in enumerate(cells)
        )
        return element("tr", *made)

    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", row(header, "th")),
            element("tbody", *(row(cells, "td") for cells in rows)),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _of_cell(name: str, number: int, left: Sequence[int]) -> dict[str, str]:
    attributes = {"scope": "col"} if name == "th" else {}
    return attributes | ({"class_": "words"} if number in left else {})


def source(place: Place, program: str) -> Html:
    """A place in a program's source: the end of its path; the whole path where one hovers.

    A program without a file of its own is called by its name.
    """
    whole = str(replace(place, file=program) if place.file == "-" else place)
    parts = whole.rpartition("site-packages/")[2].split("/")
    return element("code", "/".join(parts[-_PARTS:]), title=whole)


def details(summary: str, *content: Cell) -> Html:
    """What is hidden until somebody opens it."""
    return element("details", element("summary", summary), *content)


def section(identifier: str, title: str, *content: Cell) -> Html:
    """A part of the page."""
    return element(
        "section",
        element("h2", title, id=f"{identifier}-title"),
        *content,
        id=identifier,
        aria_labelledby=f"{identifier}-title",
    )
