"""The benchmark of saving measures steps and saves of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.tools import bench_saving


def test_a_small_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--megabytes", "1", "--width", "256", "--samples", "4"]
    bench_saving.main([*sizes, "--rounds", "2", "--steps", "2", "--folder", str(tmp_path)])
    title, _, header, _, row = capsys.readouterr().out.splitlines()
    assert title.startswith("a state of 1 MB; ")
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert cells["| executor"] == "| local"
    assert int(cells["steps beside saves"]) >= 2
    assert list(tmp_path.iterdir()) == []


def test_medians_and_growth() -> None:
    found = bench_saving.Measured(
        alone=[[1.0, 1.0, 3.0], [2.0, 2.0, 2.0]],
        beside=[[1.5, 1.5], [2.0]],
        save_returns=[0.1],
        save_is_written=[4.0],
        save_waits=[2.0],
    )
    growth = "+25% (+0% to +50%)"
    assert bench_saving._cells(found) == [
        *["2000 ms", "1500 ms", growth, "3"],
        *["100 ms", "4000 ms", "2000 ms"],
    ]
