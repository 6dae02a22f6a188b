"""A page read back: its elements, and its numbers against PLAN.json."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def entry_of(plan: Any, path: str) -> Any:
    """`stages.0.seconds` of PLAN.json; names of phases have dots in no case."""
    for name in path.split("."):
        plan = plan[int(name)] if isinstance(plan, list) else plan[name]
    return plan


def checked_entries(page: Parsed, plan: Any) -> Counter[str]:
    """How often a page shows each entry of PLAN.json, each time with the value there."""
    shown = Counter[str]()
    for attributes in page.all("data"):
        entry = attributes.get("data-entry")
        if entry is None:
            continue
        expected = entry_of(plan, entry)
        text = expected if isinstance(expected, str) else json.dumps(expected)
        assert text == attributes["value"], entry
        shown[entry] += 1
    return shown
