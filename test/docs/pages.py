"""The fenced blocks of the pages, and what their marks say.

A mark is an HTML comment right before a block, so that a rendered page does not show it:

    <!-- output -->            what the block before it prints; `…` stands for any text of a line,
                               and a line `...` for any lines
    <!-- file: NAME -->        the block is written to this file, for the blocks after it
    <!-- slow -->              the block runs in the slow tier only
    <!-- not run: REASON -->   the block does not run

Other blocks run: `python`, `sh`, `console` (lines with `$`, each with what it prints), `toml` and
`mlir` (both are parsed). A comment `<!-- hidden`, code, `-->` is Python that runs and is not shown;
with `<!-- hidden: slow` it runs in the slow tier only. A comment `<!-- page not run: REASON -->`
marks every block after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONTRACTS = "test/passes/test_contracts.py runs the contracts"

_MARK = re.compile(r"\s*<!-- (output|slow|file|not run|page not run)(?:: (.+))? -->")
_FENCE = re.compile(r"(\s*)(`{3,})(\S*)\s*")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block, or hidden code; `line` is that of its first line of text."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""
    note: str = ""
    """the reason or the name of the file"""

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_directive(self) -> bool:
        """Whether the block is Sphinx's, not code."""
        return self.language.startswith("{") or self.language == "math"


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    mark, note, all_of_them, is_contract = "", "", "", False
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.strip() in ("<!-- hidden", "<!-- hidden: slow"):
            end = lines.index("-->", at)
            text, slow = "\n".join(lines[at + 1 : end]), line.partition(": ")[2]
            yield Block(page=page, line=at + 2, language="python", text=text, mark=slow)
            at = end
        elif found := _MARK.fullmatch(line):
            mark, note = found[1], found[2] or ""
            if mark == "page not run":
                mark, note, all_of_them = "", "", note
        elif line in ("<!-- contract -->", "<!-- end of contract -->"):
            is_contract = line == "<!-- contract -->"
        elif found := _FENCE.fullmatch(line):
            end = next(k for k in range(at + 1, len(lines)) if lines[k].strip() == found[2])
            indent = len(found[1])
            text = "\n".join(row[indent:] for row in lines[at + 1 : end])
            if is_contract:
                mark, note = "not run", CONTRACTS
            elif not mark and all_of_them:
                mark, note = "not run", all_of_them
            yield Block(page=page, line=at + 2, language=found[3], text=text, mark=mark, note=note)
            mark, note = "", ""
            at = end
        elif line.strip() and not line.lstrip().startswith("<!--"):
            mark, note = "", ""
        at += 1


def prints_as(example: str, printed: str) -> bool:
    """Whether printed text is what an example shows, apart from what its patterns leave open."""
    pieces: list[str] = []
    for line in example.strip().splitlines():
        if line.strip() == "...":
            pieces.append(r"(?:.*\n)*?")
        else:
            pieces.append(".*?".join(map(re.escape, line.rstrip().split("…"))) + r"[ \t]*\n")
    return re.fullmatch("".join(pieces) + r"\s*", printed.strip() + "\n") is not None
