"""Poses and runs benchmarks of Alpa's own searches: `python -m alpa.tools.bench --help`."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alpa.dialects import ir
from alpa.passes import PassError
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.tools.arguments import amount, count
from alpa.tools.bench.ablation import (
    NUMBERS,
    STEPS,
    Variant,
    compare,
    header,
    rows,
    varied,
    without,
)
from alpa.tools.bench.cases import load, save
from alpa.tools.bench.planted import plant
from alpa.tools.bench.posing import POSED, pose
from alpa.tools.bench.summary import Summary
from alpa.tools.errors import fail
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import until_the_reader_goes
from alpa.tools.solve import CaseError


def pose_all(folder: Path, only: Sequence[str]) -> None:
    """Writes the problems whose name contains one of ``only`` (all if it is empty)."""
    folder.mkdir(parents=True, exist_ok=True)
    for posed in POSED:
        if only and not any(part in posed.name for part in only):
            continue
        begun = time.monotonic()
        try:
            cases = list(pose(posed))
        except (PassError, ir.MLIRError, InfeasibleError, SolverFailedError, TimeoutError) as error:
            print(f"{posed.name}: {error}", file=sys.stderr)
            continue
        for case in cases:
            path = save(case, folder)
            print(
                f"{case.name}: {case.kind}, {len(case.problem.node_costs)} nodes, "
                f"{case.problem.num_variables:,} variables, {path.stat().st_size / 1024:.0f} KiB, "
                f"{time.monotonic() - begun:.1f} s",
                flush=True,
            )


def plant_one(path: Path, nodes: int, seed: int) -> None:
    """Writes an instance with a known optimum, and prints what is known."""
    planted = plant(nodes, seed)
    path.write_bytes(gzip.compress(json.dumps(planted.document).encode()))
    print(
        f"{path}: optimum {planted.optimum}, the limit binds at {planted.binding} times; "
        f"with each node's cheapest strategy {planted.cheapest}"
    )


def step_group(text: str) -> tuple[str, ...]:
    """Parses steps that are switched off together, such as ``fusion+level``."""
    names = tuple(text.split("+"))
    for name in names:
        if name not in STEPS:
            raise argparse.ArgumentTypeError(
                f"there is no step {name!r}; the steps are {', '.join(STEPS)}"
            )
    return names


def compare_all(
    paths: Sequence[Path], variants: Sequence[Variant], time_limit: float, runs: int
) -> None:
    """Prints the table of all cases, one case at a time, then the summary by class."""
    print(header(), flush=True)
    summary = Summary()
    for path in paths:
        case = load(path)
        made = compare(case, variants, time_limit=time_limit, runs=runs)
        summary.add(case, made)
        print("\n".join(rows(case, made)), flush=True)
    print("", *summary.lines(), sep="\n", flush=True)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.bench", description="Benchmarks of Alpa's own searches."
    )
    commands = result.add_subparsers(dest="command", required=True)
    posing = commands.add_parser(
        "pose",
        description="Writes the sharding problems that the passes pose for zoo programs.",
        epilog="example: python -m alpa.tools.bench pose cases/ --only gpt-tiny",
    )
    posing.add_argument("folder", type=Path, metavar="FOLDER", help="where to write .npz files")
    posing.add_argument("--only", nargs="+", default=[], metavar="PART", help="of cases' names")
    solver = commands.add_parser(
        "solver",
        description="Solves sharding problems with all steps of the solver, then with each step "
        "switched off in turn, and prints two Markdown tables: one row per case and step, and one "
        "row per step with its effect on each class of cases. Percentages compare with the default "
        "settings.",
        epilog="example: python -m alpa.tools.bench solver cases/*.npz --steps fusion level+repair",
    )
    solver.add_argument(
        "--steps",
        nargs="+",
        type=step_group,
        default=[(name,) for name in STEPS],
        metavar="STEP",
        help=f"steps to switch off; A+B switches off both (default: each of {', '.join(STEPS)})",
    )
    tuning = commands.add_parser(
        "tuning",
        description="Solves sharding problems with the default numbers of the solver's tuning, "
        "then with each number halved and doubled in turn, and prints the tables of `solver`.",
        epilog="example: python -m alpa.tools.bench tuning cases/*.npz --numbers sweeps patience",
    )
    tuning.add_argument(
        "--numbers",
        nargs="+",
        choices=list(NUMBERS),
        default=list(NUMBERS),
        metavar="NUMBER",
        help=f"numbers to vary (default: each of {', '.join(NUMBERS)})",
    )
    tuning.add_argument(
        "--factors", nargs="+", type=amount, default=[0.5, 2.0], help="default: 0.5 2"
    )
    planting = commands.add_parser(
        "plant",
        description="Writes an instance of the contest whose optimum is known, and prints it.",
        epilog="example: python -m alpa.tools.bench plant case.json.gz --nodes 40000 --seed 1",
    )
    planting.add_argument("file", type=Path, metavar="FILE.json.gz", help="where to write it")
    planting.add_argument("--nodes", type=count, default=40_000, help="default: 40000")
    planting.add_argument("--seed", type=int, default=0, help="default: 0")
    for command in (solver, tuning):
        command.add_argument(
            "cases",
            nargs="+",
            type=Path,
            metavar="FILE",
            help=".npz of `pose`, or a contest's .json",
        )
        command.add_argument(
            "--runs", type=count, default=1, help="runs of each; the median of seconds is printed"
        )
        command.add_argument(
            "--time-limit",
            type=amount,
            default=20.0,
            metavar="SECONDS",
            help="processor seconds of each run (default: 20)",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        with until_the_reader_goes():
            if options.command == "pose":
                pose_all(options.folder, options.only)
                return 0
            if options.command == "plant":
                plant_one(options.file, options.nodes, options.seed)
                return 0
            if options.command == "solver":
                variants = [without(names) for names in options.steps]
            else:
                variants = [
                    varied(name, factor) for name in options.numbers for factor in options.factors
                ]
            compare_all(options.cases, variants, options.time_limit, options.runs)
    except (OSError, CaseError) as error:
        return fail(error, "bench")
    return 0


if __name__ == "__main__":
    sys.exit(until_interrupted("bench", main))
