from __future__ import annotations

import logging
from pathlib import Path

import pytest

from alpa.runtime.ahead_of_time.results import Results, Texts


def test_a_program_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Results(tmp_path / "new", Texts())
    assert store.read("a") is None
    store.write("a", "HloModule é")
    assert store.read("a") == "HloModule é"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.hlo.gz"]


@pytest.mark.parametrize("cut", [0, 5, 15, -3])
def test_a_broken_file_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    store = Results(tmp_path, Texts())
    store.write("a", "HloModule test")
    path = tmp_path / "a.hlo.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        found = store.read("a")
    assert found is None
    assert f"{path} is not used" in caplog.text


def test_without_a_folder_nothing_is_kept() -> None:
    store = Results(None, Texts())
    store.write("a", "HloModule test")
    assert store.read("a") is None
