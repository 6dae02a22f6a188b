"""The page of passes shows the contracts of the passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.tools.pass_page import PageError, main, with_contracts

PAGE = Path(__file__).parents[2] / "docs" / "passes.md"


def test_the_page_is_up_to_date() -> None:
    assert main([str(PAGE), "--check"]) == 0


def test_a_contract_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "passes.md"
    copy.write_text(text.replace("| `delta` | `0.5` |", "| `delta` | `0.7` |"), encoding="utf-8")
    assert main([str(copy), "--check"]) == 1
    assert "error: run python -m alpa.tools.pass_page" in capsys.readouterr().err
    assert main([str(copy)]) == 0
    assert copy.read_text(encoding="utf-8") == text


def test_a_section_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    with pytest.raises(PageError, match=r"there is no section '## split-loops'"):
        with_contracts(text.replace("## split-loops\n", "## split-loop\n"))
    mark = "<!-- contract -->\n"
    at = text.index(mark, text.index("## layer-cluster"))
    with pytest.raises(PageError, match=r"section '## layer-cluster' needs one line <!-- contract"):
        with_contracts(text[:at] + text[at + len(mark) :])
    assert main([str(tmp_path / "none.md")]) == 1
    assert "none.md: error: No such file" in capsys.readouterr().err
