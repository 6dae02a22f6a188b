"""Measures the time and memory of the search for the models of the paper and a Llama.

    python -m alpa.tools.search_times gpt-2.6b moe-2.4b --runs 3

The models of the paper's tables 6 to 8 are planned for the paper's GPUs: hosts of eight V100s with
16 GiB. llama-8b is not in these tables: 8192 tokens and a vocabulary of 128256, for eight hosts of
eight H100s. The clusters are ideal, so that times of years compare, and moe-70b fits.

A model is lowered once, to a file, and each run of `alpa-plan` on that file is a process of its
own. No run uses results of another one in memory or caches, and lowering is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

from alpa.dialects.plan import AccumulateDtype, Schedule
from alpa.passes.alpa import STEPS
from alpa.passes.cost.device import seconds_text, size_text
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes

PHASES = ("parse", *(step.name for step in STEPS), "report")
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
_EXAMPLES = """\
examples:
  python -m alpa.tools.search_times gpt-350m moe-380m
  python -m alpa.tools.search_times --runs 3 --json times.json
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A zoo program, its cluster, and the sizes of its batch."""

    program: str
    cluster: str
    micro_batch_size: int
    num_micro_batches: int
    accumulate_dtype: AccumulateDtype = "f32"


@dataclass(frozen=True, kw_only=True)
class Times:
    """The time and memory of a search, or the median of each number over several."""

    phases: dict[str, float]
    """seconds by name, in the order of the search"""
    total: float
    """seconds of all phases"""
    peak_bytes: int
    """resident, in the largest of the search's processes"""
    step_seconds: float
    """of the plan, predicted"""

    @classmethod
    def median(cls, runs: Sequence[Times]) -> Times:
        """Takes medians number by number, so the phases need not add up to the total."""
        return cls(
            phases={name: median(run.phases[name] for run in runs) for name in runs[0].phases},
            total=median(run.total for run in runs),
            peak_bytes=int(median(run.peak_bytes for run in runs)),
            step_seconds=median(run.step_seconds for run in runs),
        )


class SearchError(Exception):
    """A program cannot be lowered or planned; `str` is the command's error."""


def _cases() -> dict[str, Case]:
    """The cases, with the batches of the models' papers, as in docs/figures.md."""
    sizes = {
        "gpt": ("350m", "1.3b", "2.6b", "6.7b", "15b", "39b"),
        "moe": ("380m", "1.3b", "2.4b", "10b", "27b", "70b"),
        "wresnet": ("250m", "1b", "2b", "4b", "6.8b", "13b"),
    }
    clusters = [f"v100-16gb:{shape},ideal" for shape in ("1x1", "1x4", "1x8", "2x8", "4x8", "8x8")]
    cases = [
        Case(
            program=f"{family}-{size}",
            cluster=cluster,
            micro_batch_size=32 if family == "wresnet" else 8,
            num_micro_batches=48 if family == "wresnet" else 128,
            # Its state with sums in f32 needs 1.02 TiB, and 64 V100s have 1 TiB.
            accumulate_dtype="same" if f"{family}-{size}" == "moe-70b" else "f32",
        )
        for family, names in sizes.items()
        for size, cluster in zip(names, clusters, strict=True)
    ]
    llama = Case(
        program="llama-8b", cluster="h100:8x8,ideal", micro_batch_size=8, num_micro_batches=64
    )
    return {case.program: case for case in [*cases, llama]}


CASES = _cases()


def measure(case: Case, *, runs: int, schedule: str) -> list[Times]:
    """Lowers a program, and plans it that many times.

    Raises:
        SearchError: it cannot be lowered or planned.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{case.program}.mlir"
        lower(case, file)
        return [measure_file(file, case, schedule=schedule) for _ in range(runs)]


def lower(case: Case, file: Path) -> None:
    """Lowers the program of a case in a process of its own.

    Raises:
        SearchError: it cannot be lowered.
    """
    size = str(case.micro_batch_size)
    _peak_bytes(["alpa.tools.zoo", case.program, "--micro-batch-size", size, "-o", str(file)])


def measure_file(file: Path, case: Case, *, schedule: str, options: Sequence[str] = ()) -> Times:
    """Plans the program of a case, lowered to a file, in a fresh process.

    Args:
        options: more of `alpa-plan`.

    Raises:
        SearchError: it cannot be planned.
    """
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "plan.json"
        command = ["alpa.tools.alpa_plan", str(file), "--cluster", case.cluster]
        command += ["--num-micro-batches", str(case.num_micro_batches)]
        command += ["--accumulate-dtype", case.accumulate_dtype]
        command += ["--schedule", schedule, *options, "--json", str(numbers)]
        peak_bytes = _peak_bytes(command)
        report = json.loads(numbers.read_text(encoding="utf-8"))
    return Times(
        phases=report["phases"],
        total=report["search_seconds"],
        peak_bytes=peak_bytes,
        step_seconds=report["predicted_step_seconds"],
    )


def _peak_bytes(module: Sequence[str]) -> int:
    """Runs a Python module with arguments; returns the peak memory of it or of a child process.

    A new process starts with its parent's memory, so this process must stay small: it imports no
    JAX.

    Raises:
        SearchError: its exit status is not 0.
    """
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *module], stdout=subprocess.DEVNULL, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            raise SearchError(text or f"{module[0]} ended with status {process.returncode}")
    return usage.ru_maxrss * _RSS_UNIT


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.search_times",
        description="Plans the paper's models for the paper's numbers of GPUs, and llama-8b for 64 "
        "H100s, each in a fresh process, and prints the seconds of the search by phase, without "
        "lowering, and its peak resident memory, as Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("programs", nargs="*", metavar="MODEL", help=f"default: all: {', '.join(CASES)}")
    add("--runs", type=count, default=1, metavar="N", help="runs to take medians of; default: 1")
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples at a time; default: 8, for Wide-ResNet 32",
    )
    add(
        "--num-micro-batches",
        type=count,
        metavar="N",
        help="forward and backward runs per update; default: 128, for Wide-ResNet 48, for Llama 64",
    )
    add(
        "--accumulate-dtype",
        choices=get_args(AccumulateDtype),
        help="narrowest type of gradients' sums; default: f32, and same for moe-70b, which does "
        "not fit with f32",
    )
    add(
        "--schedule",
        choices=["auto", *get_args(Schedule)],
        default="1f1b",
        help="order of the micro-batches; default: 1f1b, the paper's",
    )
    add("--json", type=Path, metavar="FILE", help="where to write the numbers of each run")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 if a program could not be planned."""
    options = parser().parse_args(arguments)
    if unknown := [name for name in options.programs if name not in CASES]:
        print(f"error: no model {unknown[0]}; there are {', '.join(CASES)}", file=sys.stderr)
        return 1
    if options.json is not None and not options.json.absolute().parent.is_dir():
        print(f"error: cannot write {options.json}: there is no such folder", file=sys.stderr)
        return 1
    changes = {
        name: getattr(options, name)
        for name in ("micro_batch_size", "num_micro_batches", "accumulate_dtype")
        if getattr(options, name) is not None
    }
    cases = [replace(CASES[name], **changes) for name in options.programs or CASES]
    results: list[dict[str, Any]] = []
    problems: list[str] = []
    columns = ["model", "cluster", "micro-batches", *PHASES, "total", "peak memory", "step"]
    with until_the_reader_goes():
        print(markdown_header(columns), flush=True)
        for case in cases:
            try:
                runs = measure(case, runs=options.runs, schedule=options.schedule)
            except SearchError as error:
                print(markdown_row([*_named(case), "not possible"]), flush=True)
                problems.append(f"{case.program}: {error}")
            else:
                print(markdown_row([*_named(case), *_cells(Times.median(runs))]), flush=True)
                results.append(asdict(case) | {"runs": [asdict(run) for run in runs]})
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.json is not None:
        options.json.write_text(f"{json.dumps(results, indent=2)}\n", encoding="utf-8")
    return 1 if problems else 0


def _named(case: Case) -> list[str]:
    return [case.program, case.cluster, f"{case.num_micro_batches} of {case.micro_batch_size}"]


def _cells(times: Times) -> list[str]:
    seconds = [times.phases[name] for name in PHASES]
    memory, step = size_text(times.peak_bytes), seconds_text(times.step_seconds)
    return [*map(seconds_text, (*seconds, times.total)), memory, step]


if __name__ == "__main__":
    sys.exit(until_interrupted("search_times", main))
