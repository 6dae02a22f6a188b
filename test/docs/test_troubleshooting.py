"""The messages of the page about errors are those of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from test.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@cache
def messages() -> tuple[str, ...]:
    """All texts of the source, with `…` for what is filled in."""
    found: list[str] = []
    for folder in ("passes", "runtime", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def occurs(heading: str) -> bool:
    """Whether the parts of a heading between `…` follow one another in one message."""
    pattern = re.compile(".*".join(map(re.escape, heading.split("…"))), re.DOTALL)
    return any(pattern.search(message) for message in messages())


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_is_in_the_source(heading: str) -> None:
    assert occurs(heading)


def test_a_message_that_is_gone_is_found() -> None:
    assert not occurs("cannot make … stages of … layers on … devices")


def test_every_message_has_a_cause_and_a_remedy() -> None:
    for section in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]:
        assert "\n**Cause.** " in section, section
        assert "\n**Remedy.** " in section, section
