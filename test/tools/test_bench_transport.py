"""The benchmark of transports sends what it says."""

from __future__ import annotations

import pytest

from alpa.tools.bench_transport import main, time_tiles


def test_each_size_is_timed() -> None:
    small, large = time_tiles("shared", [4, 1 << 16], rounds=3)
    assert (small.size, large.size) == (4, 1 << 16)
    assert all(len(it.seconds) == 3 and min(it.seconds) > 0 for it in (small, large))


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpa.tools.bench_transport._SIZES", (4, 1 << 20))
    main(["--transport", "tcp", "--rounds", "2"])
    header, _, small, large = capsys.readouterr().out.splitlines()
    assert header.startswith("| transport | bytes | us, median |")
    assert small.startswith("| tcp | 4 |")
    assert large.startswith("| tcp | 1,048,576 |")
