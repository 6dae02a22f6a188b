"""What is refused, with the place of the work that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.passes.schedules.named import NAMES, Name, schedule_of
from alpa.passes.schedules.table import from_words, parse_table, read_table, to_table
from alpa.passes.schedules.verify import ScheduleError

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", r"s.csv:1:1: the schedule has no work"),
        ("0F0,0X1\n", r's.csv:1:5: "0X1" is no work; expected <stage><F, B, I or W>'),
        ("0F0,, 0F0\n", r"s.csv:1:7: 0F0 is listed twice: mesh 0 has it already"),
        ("0F0,0B0\n0F1,0B1\n", r"s.csv:2:1: stage 0 is on mesh 0 and on mesh 1"),
        ("0F0,0F2\n", r"s.csv:1:1: 0F1 is missing: each of the 1 stages runs each of the 3"),
        ("# two\n\n0F0\n2F0\n", r"s.csv:1:1: 1F0 is missing: each of the 3 stages"),
        ("0F0,0B0,0W0\n", r"s.csv:1:9: both 0B0 and 0W0 are listed"),
        ("0F0,0I0\n", r"s.csv:1:5: 0W0 is missing, the other part of 0I0"),
        ("0F0,0F1,0B0\n", r"s.csv:1:5: 0B1 is missing: other micro-batches"),
        ("0B0,0F0\n", r"s.csv:1:1: 0B0 depends on 0F0, which mesh 0 runs later; move 0F0 before"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            r"s.csv:1:5: these meshes wait for one another: mesh 0 waits at 0B0 for 1B0, "
            r"mesh 1 waits at 1F1 for 0F1",
        ),
    ],
)
def test_tables_that_are_refused(tmp_path: Path, table: str, message: str) -> None:
    file = tmp_path / "s.csv"
    file.write_text(table)
    with pytest.raises(ScheduleError, match=message):
        read_table(file)


def test_lists_of_words() -> None:
    rows = [row.split(",") for row in GOOD.split()]
    assert from_words(rows) == schedule_of("1f1b", 2, 2) == parse_table(GOOD)
    with pytest.raises(ScheduleError, match='mesh 1: "F0" is no work'):
        from_words([["0F0"], ["F0"]])
    with pytest.raises(ScheduleError, match="0B0 depends on 0F0") as raised:
        from_words([["0B0", "0F0"]])
    assert raised.value.at == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_read_as_they_were_written(name: Name) -> None:
    schedule = schedule_of(name, 4, 8)
    assert parse_table(to_table(schedule)).lists == schedule.lists
