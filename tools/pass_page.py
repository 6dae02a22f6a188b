"""Writes the contracts of the passes into docs/passes.md, from the passes' docstrings.

    python -m alpa.tools.pass_page docs/passes.md
    python -m alpa.tools.pass_page --check docs/passes.md

The docstring of a pass's file has the sections `SECTIONS`, in this order. Each section `## NAME` of
the page has the two lines `<!-- contract -->` and `<!-- end of contract -->`. The tool writes what
stands between them: the sections of the docstring, with a table of the pass's options. With
`--check` it writes nothing, and the exit status is 1 if the file is not up to date.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Self

from alpa.passes.base import Option, Pass
from alpa.passes.pipeline import PASSES, load_pass
from alpa.tools.interrupts import until_interrupted

SECTIONS = ("Before", "After", "Requires", "Ensures", "Options", "Fails when")
_BEGIN, _END = "<!-- contract -->\n", "<!-- end of contract -->\n"
_EXAMPLES = """\
examples:
  python -m alpa.tools.pass_page docs/passes.md
"""


class PageError(Exception):
    """A page or a docstring does not have the expected form; `str` says where."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What the docstring of a pass's file says, section by section."""

    before: str
    """a module"""
    pipeline: str
    """the pass, with options where the example needs any"""
    after: str
    """the module that the pipeline makes of it; `…` stands for any text"""
    requires: str
    ensures: str
    options: str
    fails_when: str

    @classmethod
    def of(cls, kind: type[Pass]) -> Self:
        """The contract of a pass.

        Raises:
            PageError: the docstring lacks a section, or has them in another order.
        """
        doc = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
        _, *parts = re.split(rf"^\*\*({'|'.join(SECTIONS)})\*\*", doc, flags=re.MULTILINE)
        names, texts = tuple(parts[::2]), parts[1::2]
        if names != SECTIONS:
            raise PageError(
                f"{kind.name}: the docstring has the sections {', '.join(names) or 'none'}; "
                f"expected {', '.join(SECTIONS)}"
            )
        (_, before), (pipeline, after) = (_code(kind, text) for text in texts[:2])
        prose = [text.removeprefix(":").strip() for text in texts[2:]]
        requires, ensures, options, fails_when = prose
        return cls(
            before=before,
            pipeline=pipeline or kind.name,
            after=after,
            requires=requires,
            ensures=ensures,
            options=options,
            fails_when=fails_when,
        )

    def markdown(self, options: Mapping[str, Option]) -> str:
        """The contract as a part of the page."""
        table = (
            f"**Options**:\n\n{_table(options)}" if options else f"**Options**: {self.options}\n"
        )
        return (
            f"**Before**\n\n```mlir\n{self.before}\n```\n\n"
            f"**After** `{self.pipeline}`\n\n```mlir\n{self.after}\n```\n\n"
            f"**Requires**: {self.requires}\n\n"
            f"**Ensures**: {self.ensures}\n\n"
            f"{table}\n"
            f"**Fails when** {self.fails_when}\n"
        )


def _code(kind: type[Pass], text: str) -> tuple[str | None, str]:
    """The pipeline and the lines of a section such as `**After** `PIPELINE`::`."""
    found = re.fullmatch(r"(?: `([^`]+)`)?::\n\n((?:(?: {4}.*)?\n)+)\s*", text)
    if found is None:
        raise PageError(f"{kind.name}: Before and After end with '::' and an indented module")
    return found[1], dedent(found[2]).strip("\n")


def with_contracts(page: str) -> str:
    """The page with the contracts of all passes as they are now.

    Raises:
        PageError: a pass has no section, its section does not hold one contract, or its docstring
            does not have the expected form.
    """
    for name in PASSES:
        section = re.search(rf"^## {name}\n.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        if section is None:
            raise PageError(f"there is no section '## {name}'")
        parts = re.split(f"{_BEGIN}|{_END}", section[0])
        if len(parts) != 3:
            raise PageError(
                f"section '## {name}' needs one line {_BEGIN.strip()}, and then one line "
                f"{_END.strip()}"
            )
        kind = load_pass(name)
        contract = Contract.of(kind).markdown(kind.own_options())
        text = f"{parts[0]}{_BEGIN}\n{contract}\n{_END}{parts[2]}"
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
        description="Writes the contracts of the passes into the page of passes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("page", type=Path, metavar="PAGE", help="docs/passes.md")
    parser.add_argument("--check", action="store_true", help="write nothing; is it up to date?")
    options = parser.parse_args(arguments)
    try:
        old = options.page.read_text(encoding="utf-8")
        new = with_contracts(old)
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
    sys.exit(until_interrupted("pass_page", main))
