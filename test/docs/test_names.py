"""Names in backticks exist: modules and functions, attributes of the IR, options, passes, files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from alpa.tools.alpa_plan_arguments import parser
from test.docs.pages import PAGES, ROOT

SOURCES = ("cmake/alpa", "dialects", "frontends", "passes", "runtime", "stress", "tools")
FOREIGN = {
    "--head",
    "--address",
    "--port",
    "--num-cpus",
    "--xla_dump_large_constants",
    "lint-imports",
}
"""Options of Ray's commands and of XLA, and commands of others."""
EXAMPLES = re.compile(r"limit[-_]constants|descent")
"""What docs/extending.md adds as examples."""


@cache
def source() -> str:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@cache
def words() -> frozenset[str]:
    """What the source, the tests and the project's settings write, word by word."""
    tests = [path for path in (ROOT / "test").rglob("*.py") if path.parent.name != "docs"]
    others = [ROOT / "pyproject.toml", *tests, *(ROOT / "docs").glob("*.py")]
    text = source() + "\n".join(path.read_text(encoding="utf-8") for path in others)
    return frozenset(re.findall(r"[A-Za-z_][\w-]*", text))


def spans(page: Path) -> Iterator[str]:
    """The text between backticks, outside of fenced blocks and comments."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    yield from re.findall(r"(?<!`)`([^`]+)`(?!`)", text)


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or leads to an attribute of one."""
    parts = name.split(".")
    if parts[:2] == ["alpa", "torch"] and find_spec("torchax") is None:
        return True  # Unknown: the module needs an extra.
    for stop in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError:
            continue
        for part in parts[stop:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, part) and part not in fields:
                return False
            found = getattr(found, part, None)
        return True
    return False


def missing(page: Path) -> list[str]:
    """The names of a page that do not exist."""
    found: list[str] = []
    for span in spans(page):
        if EXAMPLES.search(span) or span in FOREIGN:
            continue
        for name in re.findall(r"(?<![\w./@-])alpa(?:\.[A-Za-z_]\w*)+(?!\w*[/\"-])", span):
            if not resolves(name) and f'"{name}"' not in source():
                found.append(name)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span):
            if f'"{option}"' not in source() and option not in FOREIGN:
                found.append(option)
        for option in re.findall(r"(?<![\w-])([a-z][a-z_-]*)=", span):
            if option not in words():
                found.append(option)
        if re.fullmatch(r"[a-z]+(?:-[a-z0-9]+)+", span) and span not in words():
            found.append(span)
        if re.fullmatch(r"[a-z_]+(?:/[\w.-]+)+\.(?:py|mlir|md)", span) and not (
            any((ROOT / folder / span).exists() for folder in ("", "passes", "test"))
        ):
            found.append(span)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_backticks_exist(page: Path) -> None:
    assert missing(page) == []


def test_every_formula_has_its_place_in_the_code() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    formulas = [section for section in page.split("\n## ") if "```math" in section]
    assert len(formulas) >= 4
    for section in formulas:
        *_, last = section.split("```math")
        assert "* Code: `alpa." in last, section.partition("\n")[0]


def test_every_option_of_alpa_plan_is_described() -> None:
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    named = {"--help", *re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page)}
    assert not [
        action.option_strings
        for action in parser()._actions
        if action.option_strings and not named.intersection(action.option_strings)
    ]


def test_names_that_do_not_exist_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`alpa.passes.runs` `alpa.passes.run(text)` `alpa.roles` `alpa.role` `--clusters` "
        "`alpa-plan --cluster` `num-stage=2` `num-stages=2` `layer-clusters` `layer-cluster` "
        "`passes/alpha.py` `passes/alpa.py`"
    )
    assert missing(page) == [
        "alpa.passes.runs",
        "alpa.roles",
        "--clusters",
        "num-stage",
        "layer-clusters",
        "passes/alpha.py",
    ]
