"""Poses and runs benchmarks of Alpa's own searches: `python -m alpa.tools.bench --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alpa.dialects import ir
from alpa.passes import PassError
from alpa.passes.solve.shard_problem import InfeasibleError, SolverFailedError
from alpa.tools.arguments import amount
from alpa.tools.bench.ablation import STEPS, ablate, header, rows
from alpa.tools.bench.cases import load, save
from alpa.tools.bench.posing import POSED, pose
from alpa.tools.errors import fail
from alpa.tools.output import until_the_reader_goes
from alpa.tools.solve import CaseError


def pose_all(folder: Path, only: Sequence[str]) -> None:
    """Writes the problems whose name contains one of ``only`` (all if there is none)."""
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


def ablate_all(paths: Sequence[Path], steps: Sequence[str], time_limit: float) -> None:
    """Prints the table of all cases, each as soon as it is known."""
    print(header(), flush=True)
    for path in paths:
        case = load(path)
        print("\n".join(rows(case, list(ablate(case, steps, time_limit)))), flush=True)


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
    posing.add_argument("--only", nargs="+", default=[], metavar="PART", help="of a case's name")
    solver = commands.add_parser(
        "solver",
        description="Solves sharding problems with all steps of the solver, then with each step "
        "switched off in turn, and prints a Markdown table. The last two columns compare with all "
        "steps.",
        epilog="example: python -m alpa.tools.bench solver cases/*.npz --steps fusion repair",
    )
    solver.add_argument(
        "cases", nargs="+", type=Path, metavar="FILE", help=".npz of `pose`, or a contest's .json"
    )
    solver.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, metavar="STEP", help=", ".join(STEPS)
    )
    solver.add_argument(
        "--time-limit",
        type=amount,
        default=20.0,
        metavar="SECONDS",
        help="of each run (default: 20)",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        with until_the_reader_goes():
            if options.command == "pose":
                pose_all(options.folder, options.only)
            else:
                ablate_all(options.cases, options.steps, options.time_limit)
    except (OSError, CaseError) as error:
        return fail(error, "bench")
    return 0


if __name__ == "__main__":
    sys.exit(main())
