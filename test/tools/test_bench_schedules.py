"""Two schedules are measured beside each other."""

from __future__ import annotations

import re

import pytest

from alpa.tools.bench_schedules import main


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_schedules_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "8", "--layers", "2", "--micro-batch", "4", "--rounds", "1", "--steps", "2"]
    main([*small, "--num-micro-batches", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "two stages of 2 layers, 2 micro-batches"
    rows = [line.split(" | ") for line in lines if line.startswith(("| zb-h1", "| 1f1b"))]
    assert [len(row) for row in rows] == [4, 4]
    assert re.fullmatch(r"zb-h1 over 1f1b: measured \d\.\d{3}, predicted \d\.\d{3}", lines[-2])
