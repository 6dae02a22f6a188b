"""Pieces of HTML: escaped text, tables, and numbers that say which entry of PLAN.json they are."""

from __future__ import annotations

import json
import re
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
    long: Sequence[int] = (),
) -> Html:
    """A table that scrolls sideways if it is too wide.

    The columns in `left` hold words. Those in `long` hold so many that they go on in further lines.
    """

    def row(cells: Sequence[Cell], scope: str) -> Html:
        made = (
            _cell(cell, number, scope, _class(number, left, long))
            for number, cell in enumerate(cells)
        )
        return element("tr", *made)

    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", row(header, "col")),
            element("tbody", *(row(cells, "row") for cells in rows)),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _cell(cell: Cell, number: int, scope: str, class_: str) -> Html:
    """The cell of a row. All cells of the head, and the first one of each row, are headers."""
    attributes = {"class_": class_} if class_ else {}
    if scope == "col" or number == 0:
        return element("th", cell, scope=scope, **attributes)
    return element("td", cell, **attributes)


def _class(number: int, left: Sequence[int], long: Sequence[int]) -> str:
    if number in long:
        return "words long"
    return "words" if number in left else ""


def source(place: Place, program: str) -> Html:
    """A place in a program's source: the end of its path; the whole path where one hovers.

    A program without a file of its own is called by its name.
    """
    whole = str(replace(place, file=program) if place.file == "-" else place)
    parts = whole.rpartition("site-packages/")[2].split("/")
    return element("code", breakable("/".join(parts[-_PARTS:])), title=whole)


def breakable(path: str) -> Html:
    """A path or the name of an op, which may go on in another line after a slash or a `_`."""
    return Html(re.sub("([/_])", r"\1<wbr>", html(path)))


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
