"""A terminal that tests read."""

from __future__ import annotations

import io
import re
import sys

import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Each state of the line, without colours and cursor moves."""
        return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", self.getvalue()).split("\r")

    @property
    def shown(self) -> list[str]:
        """What was shown, without the bar and the times."""
        found = (re.match(r"(.*?) +━", line) for line in self.lines)
        return list(dict.fromkeys(match.group(1) for match in found if match))


def new_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error; pytest sets its own behind the fixtures."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    return terminal
