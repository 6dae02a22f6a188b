"""Writes the tables of options in docs/passes.md from the options of the passes.

    python -m alpa.tools.pass_page docs/passes.md
    python -m alpa.tools.pass_page --check docs/passes.md

Each section `## NAME` of a pass that has options holds one table of them. With `--check` nothing is
written, and the exit status is 1 if the file is not up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from alpa.passes.base import Option
from alpa.passes.pipeline import PASSES, load_pass

_TABLE = re.compile(r"^\| option \| default \| \|\n\|---\|---\|---\|\n(?:\|.*\n)*", re.MULTILINE)
_EXAMPLES = """\
examples:
  python -m alpa.tools.pass_page docs/passes.md
"""


class PageError(Exception):
    """The page has not the form that is expected; `str` says where."""


def with_options(page: str) -> str:
    """The page with the tables of all passes as they are now.

    Raises:
        PageError: a pass has no section, or its section does not hold one table.
    """
    for name in PASSES:
        section = re.search(rf"^## {name}\n.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        if section is None:
            raise PageError(f"there is no section '## {name}'")
        options = load_pass(name).own_options()
        tables = list(_TABLE.finditer(section[0]))
        if len(tables) != bool(options):
            raise PageError(
                f"section '## {name}' holds {len(tables)} tables of options; the pass has "
                f"{len(options)} options, so {int(bool(options))} are expected"
            )
        text = section[0]
        for table in tables:
            text = text[: table.start()] + _table(options) + text[table.end() :]
        page = page[: section.start()] + text + page[section.end() :]
    return page


def _table(options: Mapping[str, Option]) -> str:
    rows = ["| option | default | |", "|---|---|---|"]
    for name, option in options.items():
        default = option.default_text()
        rows.append(f"| `{name}` | {f'`{default}` ' if default else ''}| {option.help} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.pass_page",
        description="Writes the tables of options in the page of passes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("page", type=Path, metavar="PAGE", help="docs/passes.md")
    parser.add_argument("--check", action="store_true", help="write nothing; is it up to date?")
    options = parser.parse_args(arguments)
    try:
        old = options.page.read_text(encoding="utf-8")
        new = with_options(old)
        if old == new:
            return 0
        if options.check:
            print(f"{options.page}: error: run {parser.prog} {options.page}", file=sys.stderr)
            return 1
        options.page.write_text(new, encoding="utf-8")
    except OSError as error:
        print(f"{error.filename}: error: {error.strerror}", file=sys.stderr)
        return 1
    except PageError as error:
        print(f"{options.page}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
