"""Prints which parts of a program are equal, and what tying their variables costs.

    python -m alpa.tools.fold_table step.mlir
    python -m alpa.tools.fold_table partitioned.mlir --cost

The table folds the program graph: equal layers by structure (`passes/analysis/fold_classes.py`).
`--cost` searches the shardings of a partitioned program with equal layers tied and without
(`ilp-shard-annotate{fold=false}`). Tying costs what its objective is above the other, where that is
the optimum; where the whole search ran out of time, at most what it is above the bound that was
proven. Objectives are predicted seconds per step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from alpa import passes
from alpa.dialects import ir, main_function
from alpa.dialects.attributes import Part, SolverReport, read_solver_reports
from alpa.passes import PassError
from alpa.passes.analysis.fold_classes import (
    MIN_SHARE,
    FoldTable,
    fold_classes,
    is_clustered,
    part_ops,
)
from alpa.passes.pipelines.diagnostics import place_of
from alpa.tools.arguments import amount, share
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within

_EXAMPLE = """\
example:
  python -m alpa.tools.zoo t5-large --micro-batch-size 8 -o step.mlir
  python -m alpa.tools.fold_table step.mlir
  alpa-opt step.mlir -o partitioned.mlir --pipeline='simplify-trivial-ops,
      layer-cluster{num-layers=1},stage-mesh-partition{cluster=v100-16gb:1x8 num-stages=1}'
  python -m alpa.tools.fold_table partitioned.mlir --cost
"""


def search(partitioned: ir.Module, *, time_limit: float, gap: float) -> list[SolverReport]:
    """What is proven about each mesh of a partitioned program, with layers tied and without.

    Raises:
        ir.MLIRError: the program is not a partitioned one, or has no shardings that fit.
    """
    fields = f"fold=false time-limit={time_limit} gap={gap}"
    module = passes.run(partitioned, f"ilp-shard-annotate{{{fields}}}")
    return read_solver_reports(main_function(module))


def table(folded: FoldTable, title: str) -> str:
    """A row per class, then the whole."""
    rows = [("class", "members", "ops each", "ops", "FLOPs", "first member begins with")]
    for number, c in enumerate(folded.classes, start=1):
        share = c.members * c.size / len(folded.ops)
        flops = c.members * c.flops / folded.flops if folded.flops else 0.0
        first = _place(folded.ops[c.starts[0]])
        rows.append(
            (str(number), str(c.members), str(c.size), f"{share:.1%}", f"{flops:.1%}", first)
        )
    lines = [
        f"{title}: {len(folded.ops)} ops that depend on an argument fold to {folded.folded_ops}",
        "",
        *_aligned(rows),
        "",
        f"{len(folded.classes)} classes; those of several members hold {folded.share:.1%} of the "
        f"ops and {folded.flops_share:.1%} of the FLOPs",
    ]
    return "\n".join(lines)


def cost_table(reports: Sequence[SolverReport]) -> str:
    """A row per mesh, then the sum over all meshes."""
    rows = [("mesh", "objective folded", "whole", "cost", "at most", "variables")]
    folded = [_folded(report) for report in reports]
    for tied, report in zip(folded, reports, strict=True):
        rows.append(
            (
                report.mesh,
                f"{tied:.6g} s",
                f"{report.objective:.6g} s",
                _above(tied, report.objective),
                _above(tied, report.bound),
                str(report.variables),
            )
        )
    least, bound = sum(r.objective for r in reports), sum(r.bound for r in reports)
    lines = [
        *_aligned(rows),
        "",
        f"folding costs {_above(sum(folded), least)} of the objective, at most "
        f"{_above(sum(folded), bound)}",
    ]
    if any(report.status == "time_limit" for report in reports):
        lines.append("the whole search ran out of time, raise --time-limit to know more")
    return "\n".join(lines)


def _folded(report: SolverReport) -> float:
    """The objective where equal layers are tied; that of the whole where none are equal."""
    return report.objective if report.folded_objective is None else report.folded_objective


def _above(objective: float, least: float) -> str:
    """What an objective is above another, in percent of the other."""
    if not least:
        return "0.00%" if not objective else "unknown"
    # Rounding is no cost and no gain.
    return f"{objective / least - 1:.2%}".replace("-0.00%", "0.00%")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width, aligned at their right; the last one begins where it does."""
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in rows), strict=True)]
    return [
        "  ".join([*(t.rjust(w) for t, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]


def _place(op: ir.OpView) -> str:
    location = op.location
    name = f" {location.name_str}" if isinstance(location, ir.NameLoc) else ""
    return f"{place_of(location)} {op.name}{name}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.fold_table",
        description="Prints which parts of a program are equal, and what tying them costs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a program, text or bytecode")
    parser.add_argument(
        "--part",
        choices=("all", *get_args(Part)),
        default="forward",
        help="of a training step; backward and update are known after layer-cluster "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--min-share",
        type=share,
        default=MIN_SHARE,
        metavar="PART",
        help="of the ops, what a repeat has to save to count (default: %(default)s)",
    )
    parser.add_argument(
        "--cost",
        action="store_true",
        help="search a partitioned program's shardings with folding and without, too",
    )
    parser.add_argument(
        "--time-limit",
        type=amount,
        default=300.0,
        metavar="SECONDS",
        help="of --cost, for each mesh and search (default: %(default)s)",
    )
    parser.add_argument(
        "--gap",
        type=share,
        default=1e-3,
        metavar="PART",
        help="of --cost: how close to the optimum is good enough (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = _parser().parse_args(arguments)
    part: Part | None = None if options.part == "all" else options.part
    try:
        module = parse_within(options.file)
        if not is_clustered(module):
            if options.cost:
                raise ValueError(
                    "--cost needs a partitioned program; run alpa-opt with --pipeline="
                    "'simplify-trivial-ops,layer-cluster,stage-mesh-partition{cluster=...}' first"
                )
            module = passes.run(module, "simplify-trivial-ops")
        ops = part_ops(main_function(module), part)
        title = "all parts" if part is None else f"{part} part"
        print(table(fold_classes(ops.ops, ops.same, min_share=options.min_share), title))
        if options.cost:
            reports = search(module, time_limit=options.time_limit, gap=options.gap)
            print(f"\n{cost_table(reports)}")
    except (ir.MLIRError, PassError, OSError, ValueError) as error:
        return fail(error, options.file)
    return 0


if __name__ == "__main__":
    guard("fold_table")
    sys.exit(main())
