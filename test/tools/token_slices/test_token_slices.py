"""`token_slices`: the model of TeraPipe's latencies, its slices, and the columns of FLOP/s."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from alpa.passes.solve.tokens.slice_dp import BatchSlice
from alpa.tools.token_slices.__main__ import main, scheme
from alpa.tools.token_slices.flops import teraflops, thesis_teraflops
from alpa.tools.token_slices.model import SliceTime, best, fit, predicted
from alpa.tools.token_slices.published import SETTINGS, TABLES, Measured

ROWS = TABLES["2.3"]


@cache
def fitted(number: int) -> SliceTime:
    return fit(SETTINGS[number], [r for r in ROWS if r.setting == number and r.is_uniform])


def residual(row: Measured) -> float:
    return predicted(SETTINGS[row.setting], fitted(row.setting), row) / row.seconds - 1


@pytest.mark.parametrize("row", [r for r in ROWS if r.setting == 9], ids=lambda r: len(r.slices))
def test_the_rows_of_175b_are_within_4_percent(row: Measured) -> None:
    assert abs(residual(row)) < 0.04


@pytest.mark.parametrize("row", [r for r in ROWS if r.setting == 8], ids=lambda r: len(r.slices))
def test_the_rows_of_44b_are_within_10_percent(row: Measured) -> None:
    assert abs(residual(row)) < 0.10


@pytest.mark.parametrize("number", [8, 9])
def test_the_best_slices_are_no_slower_than_the_thesis_slices(number: int) -> None:
    (own,) = [r for r in ROWS if r.setting == number and not r.is_uniform]
    time = fitted(number)
    found = best(SETTINGS[number], time, 2048)
    assert found.seconds <= predicted(SETTINGS[number], time, own)
    uniform = [r for r in ROWS if r.setting == number and r.is_uniform]
    assert found.seconds < min(predicted(SETTINGS[number], time, row) for row in uniform)


def test_a_fit_finds_the_parameters_of_exact_rows() -> None:
    setting, time = SETTINGS[9], SliceTime(floor=4e-3, token=3e-5, pair=6e-9)
    rows = [
        Measured(
            setting=9,
            slices=row.slices,
            seconds=predicted(setting, time, row),
            deviation=0.0,
            teraflops=0.0,
        )
        for row in ROWS
        if row.setting == 9 and row.is_uniform
    ]
    found = fit(setting, rows)
    assert found.floor == pytest.approx(time.floor, rel=1e-4)
    assert found.token == pytest.approx(time.token, rel=1e-4)
    assert found.pair == pytest.approx(time.pair, rel=1e-4)


def test_two_rows_do_not_fix_the_parameters() -> None:
    with pytest.raises(ValueError, match="2 rows do not fix three parameters"):
        fit(SETTINGS[9], ROWS[5:7])


def test_slices_with_context_take_longer() -> None:
    time = SliceTime(floor=3.0, token=1.0, pair=0.5)
    seconds = time(np.array(2), np.array(2), np.array([0, 10]))
    np.testing.assert_allclose(seconds, [5.0 + 0.5 * 4 * 1, 5.0 + 0.5 * 4 * 11])


@pytest.mark.parametrize("table", TABLES)
def test_the_thesis_definition_gives_its_column(table: str) -> None:
    for row in TABLES[table]:
        assert thesis_teraflops(row) == pytest.approx(row.teraflops, rel=1.1e-3)


def test_flops_of_all_replicas_and_tokens() -> None:
    replicas = TABLES["2.2"][0]
    assert teraflops(replicas) == pytest.approx(8 * thesis_teraflops(replicas))
    long = TABLES["2.4"][2]
    assert long.tokens == 4096
    with_attention = (12 * 5120 + 4096) / (12 * 5120 + 2048)
    assert teraflops(long) == pytest.approx(2 * with_attention * thesis_teraflops(long))
    assert all(teraflops(row) == thesis_teraflops(row) for row in ROWS)


def test_slices_cover_the_sequences() -> None:
    lengths = {row.tokens for rows in (TABLES["2.2"], ROWS) for row in rows}
    assert lengths == {2048}
    assert {row.tokens for row in TABLES["2.4"]} == {2048, 4096, 6144, 8192}


def test_slices_are_written_as_in_the_thesis() -> None:
    one = BatchSlice(samples=1, lengths=(704, 688, *(64,) * 4, 32, 32))
    two = BatchSlice(samples=2, lengths=(8,))
    assert scheme([one]) == "[(1, [704, 688] + [64] * 4 + [32, 32])]"
    assert scheme([one, one, two]) == f"{scheme([one])} * 2 + [(2, [8])]"


@pytest.mark.parametrize("table", ["2.3", "2.2"])
def test_the_page_has_the_table(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", table]) == 0
    root = Path(__file__).parents[3]
    page = (root / "docs" / "token-slices.md").read_text(encoding="utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    missing = [line for line in lines if f"{line}\n" not in page]
    assert not missing


def test_an_unknown_table_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--table", "2.5"])
    assert "invalid choice: '2.5'" in capsys.readouterr().err
