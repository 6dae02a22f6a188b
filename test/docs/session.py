"""Runs the blocks of a page in order, in this process and the current folder.

    python test/docs/session.py docs/planning.md [--slow]

The Python blocks of a page share their names, and all blocks share the folder. The exit status is 1
if a block fails, or prints something else than the page says.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

from pages import Block, blocks, prints_as


class BlockError(Exception):
    """A block does not do what the page says."""


class Session:
    """What the blocks that have run leave: names, files, and what the last one printed."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.printed = ""

    def run(self, block: Block) -> None:
        if block.mark == "output":
            if not prints_as(block.text, self.printed):
                raise BlockError(f"{block.place}: printed was:\n{self.printed}")
        elif block.mark == "file":
            Path(block.note).parent.mkdir(parents=True, exist_ok=True)
            Path(block.note).write_text(block.text + "\n", encoding="utf-8")
        elif block.language == "python":
            self._python(block)
        elif block.language == "sh":
            self.printed = self._shell(block, block.text)
        elif block.language == "console":
            self._console(block)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "mlir":
            _parse(block)
        else:
            raise BlockError(f"{block.place}: a block in {block.language!r} needs a mark")

    def _python(self, block: Block) -> None:
        # With the page as its file, a traceback shows the line of the page.
        text = "\n" * (block.line - 1) + block.text
        code = compile(text, str(block.page), "exec", dont_inherit=True)
        captured = io.StringIO()
        with redirect_stdout(captured):
            exec(code, self.names)
        self.printed = captured.getvalue()

    def _shell(self, block: Block, command: str, *, may_fail: bool = False) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode and not may_fail:
            raise BlockError(f"{block.place}: exit status {done.returncode}:\n{done.stdout}")
        return done.stdout

    def _console(self, block: Block) -> None:
        for part in ("\n" + block.text).split("\n$ ")[1:]:
            command, _, example = part.partition("\n")
            self.printed = self._shell(block, command, may_fail=True)
            if not prints_as(example, self.printed):
                raise BlockError(f"{block.place}: `{command}` printed:\n{self.printed}")


def _parse(block: Block) -> None:
    from alpa.dialects import parse  # noqa: PLC0415, most pages need no MLIR

    parse(block.text)


def main(page: Path, *, slow: bool) -> None:
    session, ran = Session(), True
    for block in blocks(page):
        if block.is_directive:
            continue
        if block.mark != "output":  # Output is that of the block before it.
            ran = block.mark != "not run" and (block.mark != "slow" or slow)
        if ran:
            session.run(block)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve(), slow="--slow" in sys.argv)
    except BlockError as error:
        sys.exit(str(error))
