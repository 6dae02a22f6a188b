"""Prints which layers of a program are equal, and what tying their variables costs.

    python -m alpa.tools.fold_table step.mlir --num-layers 24
    python -m alpa.tools.fold_table partitioned.mlir --cost

The table shows the classes of equal layers, each of which `stage-mesh-partition` costs once
(`passes/stages/layer_classes.py`). `--cost` searches the shardings of a partitioned program with
equal layers tied and without (`ilp-shard-annotate{fold=false}`). Tying costs what its objective is
above the other, where that is the optimum. Where the whole search ran out of time, tying costs at
most what its objective is above the bound that was proven. Objectives are predicted seconds per
step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from alpa import passes
from alpa.dialects import body, ir, main_function, mpmd, walk
from alpa.dialects.attributes import FLOPS, read_arguments, read_results
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import SolverReport, read_solver_reports
from alpa.passes import PassError
from alpa.passes.analysis.graph import Graph
from alpa.passes.pipelines.diagnostics import place_of
from alpa.passes.stages.layer_classes import equal_layers, layer_members
from alpa.tools.arguments import amount, count_or_auto, share
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within
from alpa.tools.interrupts import until_interrupted

_EXAMPLE = """\
example:
  python -m alpa.tools.zoo t5-large --micro-batch-size 8 -o step.mlir
  python -m alpa.tools.fold_table step.mlir --num-layers 48
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
    module = passes.run(partitioned, f"place-gradient-reductions,ilp-shard-annotate{{{fields}}}")
    return read_solver_reports(main_function(module))


@dataclass(frozen=True, kw_only=True)
class FoldClass:
    """Equal layers: their numbers, and the ops and FLOPs of each, in all parts of a step."""

    layers: tuple[int, ...]
    ops: int
    flops: int
    place: str
    """where the first layer begins"""


def fold_classes(clustered: ir.Module) -> list[FoldClass]:
    """The classes of a program that `layer-cluster` has cut, in the order of their first layers."""
    function = main_function(clustered)
    graph = Graph.of(body(function))
    origins = [Origin.of(op) for op in graph.ops]
    members = layer_members(graph, 1 + max((it.layer or 0 for it in origins), default=-1))
    equal = equal_layers(graph, read_arguments(function), read_results(function), members, {})
    found: list[FoldClass] = []
    for layers in equal:
        computations = [graph.ops[o] for o in members[layers[0]]]
        ops = [op for it in computations for op in list(body(it).operations)[:-1]]
        found.append(
            FoldClass(
                layers=tuple(layers),
                ops=len(ops),
                flops=sum(ir.IntegerAttr(it.attributes[FLOPS]).value for it in computations),
                place=_place(ops[0]),
            )
        )
    return found


def table(classes: Sequence[FoldClass]) -> str:
    """A row per class, then the whole."""
    rows = [("class", "layers", "ops each", "ops", "FLOPs", "first layer begins with")]
    ops = sum(len(c.layers) * c.ops for c in classes)
    flops = sum(len(c.layers) * c.flops for c in classes)
    shares = [
        (len(c.layers) * c.ops / ops, len(c.layers) * c.flops / flops if flops else 0.0)
        for c in classes
    ]
    for number, (c, (of_ops, of_flops)) in enumerate(zip(classes, shares, strict=True), start=1):
        counts = (str(number), str(len(c.layers)), str(c.ops))
        rows.append((*counts, f"{of_ops:.1%}", f"{of_flops:.1%}", f"layer_{c.layers[0]} {c.place}"))
    several = [it for it, c in zip(shares, classes, strict=True) if len(c.layers) > 1]
    lines = [
        f"{sum(len(c.layers) for c in classes)} layers with {ops} ops fold to {len(classes)} with "
        f"{sum(c.ops for c in classes)}",
        "",
        *_aligned(rows),
        "",
        f"classes of several layers hold {sum(it for it, _ in several):.1%} of the ops and "
        f"{sum(it for _, it in several):.1%} of the FLOPs",
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
        lines.append("the whole search ran out of time; raise --time-limit for a tighter bound")
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


def _is_clustered(module: ir.Module) -> bool:
    """Whether `layer-cluster` has run.

    Raises:
        ValueError: the layers are merged into stages.
    """
    if any(isinstance(op, mpmd.FragmentOp) for op in walk(module.body)):
        raise ValueError(
            "the layers of this program are merged into stages; give the program itself or what "
            "layer-cluster makes of it, or search the shardings of its meshes with --cost"
        )
    return any(isinstance(op, mpmd.NamedComputationOp) for op in walk(module.body))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.fold_table",
        description="Prints which layers of a program are equal, and what tying them costs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a program, text or bytecode")
    parser.add_argument(
        "--num-layers",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="cut the program into so many layers, as layer-cluster's num-layers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--cost",
        action="store_true",
        help="instead of the table, search a partitioned program's shardings with folding and "
        "without",
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
    try:
        module = parse_within(options.file)
        if options.cost:
            reports = search(module, time_limit=options.time_limit, gap=options.gap)
            print(cost_table(reports))
        else:
            if not _is_clustered(module):
                layers = f"layer-cluster{{num-layers={options.num_layers}}}"
                module = passes.run(module, f"simplify-trivial-ops,split-loops,{layers}")
            print(table(fold_classes(module)))
    except (ir.MLIRError, PassError, OSError, ValueError) as error:
        return fail(error, options.file)
    return 0


if __name__ == "__main__":
    guard("fold_table")
    sys.exit(until_interrupted("fold_table", main))
