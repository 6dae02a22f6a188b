"""Compares TeraPipe's published latencies with a model of them, and its slices with the best ones.

    python -m alpa.tools.token_slices --table 2.3

For table 2.3, the time of a slice is fitted to the uniform slicings of each setting. The latency of
the thesis' own slices is then predicted, and that of the best slices under the same model. All
tables have the TFLOP/s per GPU as published, as the thesis defines them, and of all the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from alpa.passes.solve.tokens.slice_dp import BatchSlice, Solution
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.token_slices.flops import teraflops, thesis_teraflops
from alpa.tools.token_slices.model import GRANULARITY, SliceTime, best, fit, predicted
from alpa.tools.token_slices.published import SETTINGS, TABLES, Measured

_EXAMPLES = """\
examples:
  python -m alpa.tools.token_slices --table 2.3    latencies and TFLOP/s of the ablation
  python -m alpa.tools.token_slices --table 2.2    TFLOP/s of the main results
"""
_FLOPS = (
    "TFLOP/s, published",
    "TFLOP/s, as the thesis defines them",
    "TFLOP/s, all replicas and tokens",
)
FITTED = "2.3"
"""the table with enough uniform slicings of a setting"""


def scheme(batch_slices: Sequence[BatchSlice]) -> str:
    """Slices as the thesis writes them: `[(1, [704, 688] + [64] * 4)] * 2`. Lengths are tokens."""
    texts: list[str] = []
    for part, equal in groupby(batch_slices):
        lists: list[str] = []
        few: list[int] = []
        for length, run in groupby(part.lengths):
            count = len(list(run))
            if count < 3:
                few += [length] * count
                continue
            lists += [str(few)] * bool(few) + [f"[{length}] * {count}"]
            few = []
        lists += [str(few)] * bool(few)
        count = len(list(equal))
        text = f"[({part.samples}, {' + '.join(lists)})]"
        texts.append(f"{text} * {count}" if count > 1 else text)
    return " + ".join(texts)


def latency_lines() -> Iterator[str]:
    """Table 2.3: the fitted parameters, and all rows beside the model."""
    fits = {number: _fit(number) for number in _fitted_settings()}
    columns = ["setting", "K", "sequences", "floor, ms", "token, us", "pair, ns", "uniform rows"]
    yield markdown_header(columns)
    for number, (time, uniform) in fits.items():
        setting = SETTINGS[number]
        figures = (f"{time.floor * 1e3:.3g}", f"{time.token * 1e6:.3g}", f"{time.pair * 1e9:.3g}")
        cells = [_name(number), str(setting.stages), str(setting.samples), *figures]
        yield markdown_row([*cells, str(len(uniform))])
    yield ""
    columns = ["setting", "slices", "measured, s", "model, s", "residual", "deviation", "row is"]
    yield markdown_header([*columns, *_FLOPS])
    for number, (time, uniform) in fits.items():
        setting = SETTINGS[number]
        rows = [row for row in TABLES[FITTED] if row.setting == number]
        for row in rows:
            seconds = predicted(setting, time, row)
            residual = f"{seconds / row.seconds - 1:+.1%}"
            deviation = f"{row.deviation / row.seconds:.1%}"
            cells = [_name(number), _row_scheme(row)]
            cells += [f"{row.seconds:.3f}", f"{seconds:.3f}", residual, deviation]
            yield markdown_row([*cells, "fitted" if row in uniform else "predicted", *_flops(row)])
        found = best(setting, time, rows[0].tokens)
        cells = [_name(number), scheme(_tokens(found)), "", f"{found.seconds:.3f}", "", ""]
        yield markdown_row([*cells, "ours, predicted", "", "", ""])


def flops_lines(table: str) -> Iterator[str]:
    """The TFLOP/s per GPU of a table."""
    yield markdown_header(["setting", "tokens", "slices", "measured, s", *_FLOPS])
    for row in TABLES[table]:
        cells = [_name(row.setting), str(row.tokens), _row_scheme(row)]
        yield markdown_row([*cells, f"{row.seconds:.3f}", *_flops(row)])


def _fitted_settings() -> list[int]:
    return list(dict.fromkeys(row.setting for row in TABLES[FITTED]))


def _fit(number: int) -> tuple[SliceTime, list[Measured]]:
    uniform = [row for row in TABLES[FITTED] if row.setting == number and row.is_uniform]
    return fit(SETTINGS[number], uniform), uniform


def _row_scheme(row: Measured) -> str:
    setting = SETTINGS[row.setting]
    samples = setting.samples if row.batch is None else row.batch // setting.replicas
    return scheme([BatchSlice(samples=1, lengths=row.slices)] * samples)


def _tokens(solution: Solution) -> list[BatchSlice]:
    """The slices with their lengths in tokens."""
    return [
        replace(part, lengths=tuple(GRANULARITY * length for length in part.lengths))
        for part in solution.batch_slices
    ]


def _name(number: int) -> str:
    return f"{SETTINGS[number].name} ({number})"


def _flops(row: Measured) -> tuple[str, ...]:
    return (f"{row.teraflops:.4f}", f"{thesis_teraflops(row):.4f}", f"{teraflops(row):.4f}")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.token_slices",
        description="Compares the latencies that TeraPipe's thesis publishes with a model of them. "
        "Table 2.3: the time of a slice is fitted to the uniform slicings; the thesis' own slices "
        "and the best ones are predicted. All tables: TFLOP/s per GPU. Prints Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument(
        "--table", choices=sorted(TABLES), default=FITTED, help="default: %(default)s"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    lines = latency_lines() if options.table == FITTED else flops_lines(options.table)
    with until_the_reader_goes():
        for line in lines:
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(until_interrupted("token_slices", main))
