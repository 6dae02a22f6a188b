"""The pace of two workers beside strangers."""

from __future__ import annotations

import pytest

from stress.strangers import pace as tool
from stress.strangers.__main__ import main


def test_a_row_for_an_attack(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--transport", "tcp", "--attack", "idle", "--rounds", "3", "--tile", "65536"])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| tcp | idle |")


def test_strangers_that_do_not_attack_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "_attack", sum)  # it fails at once
    with pytest.raises(RuntimeError, match="the strangers have ended with 1"):
        tool.pace("tcp", 65536, 3, "idle")
