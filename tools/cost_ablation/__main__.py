"""Ranks strategies by TAPAS' cost equation, with its parts added one by one (the paper's table 2).

    python -m alpa.tools.cost_ablation --cluster calibrated.toml --work ablation/

Each of 15 small training steps gets several strategies on one mesh of virtual CPU devices: those of
TAPAS, the baselines, and random ones. Each strategy is compiled and timed, and its cost is computed
by each model:

* baseline: equations 1 to 4 with all coefficients 1, and constants are messages, too
* CF: constants are filtered
* GO: gamma discounts the messages of backward and update; for each program it is the one of
  1, 0.5, 0.25 and 0.1 that ranks the other programs best
* EC: epsilon of each collective, as the cluster file has measured it
* Alpa's: compute by roofline, and collectives as measured
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from alpa.dialects import ir, parse
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.equation import measured_epsilon
from alpa.passes.pipelines.diagnostics import format_error
from alpa.runtime.loading import LoadError
from alpa.tools.arguments import count
from alpa.tools.cost_ablation.candidates import Strategies
from alpa.tools.cost_ablation.conditions import Conditions, text
from alpa.tools.cost_ablation.programs import PROGRAMS
from alpa.tools.cost_ablation.table import Measured, table
from alpa.tools.interrupts import until_interrupted
from alpa.tools.plan_ranking.plans import RankedPlan
from alpa.tools.plan_ranking.programs import RankedProgram
from alpa.tools.plan_ranking.times import measured_seconds


def costed(program: RankedProgram, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The costs of a program's strategies by model, whose plans lie in the folder afterwards."""
    folder: Path = options.work / program.name
    file = folder / "costs.json"
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    strategies = Strategies.of(
        program.training().lower(program.micro_batch_size),
        options.cluster,
        shape=options.shape,
        count=options.strategies,
        seed=options.seed,
    )
    folder.mkdir(parents=True, exist_ok=True)
    for plan in strategies.plans():
        (folder / f"{plan.name}.mlir").write_text(f"{plan.module}\n", encoding="utf-8")
    costs = strategies.costs
    _write(file, costs)
    return costs


def timed(
    program: RankedProgram, names: Sequence[str], options: argparse.Namespace
) -> tuple[Measured, Conditions]:
    """The strategies with their measured seconds, and the conditions of the measurement."""
    folder: Path = options.work / program.name
    file = folder / "times.json"
    if not file.exists():
        texts = {name: (folder / f"{name}.mlir").read_text(encoding="utf-8") for name in names}
        plans = [RankedPlan(name=name, module=parse(plan)) for name, plan in texts.items()]
        conditions = Conditions.now()
        seconds = measured_seconds(program, plans, runs=options.runs)
        by_name = dict(zip(names, seconds, strict=True))
        _write(file, {"conditions": asdict(conditions), "seconds": by_name})
    times = json.loads(file.read_text(encoding="utf-8"))
    costs = costed(program, options)
    measured = Measured(program=program.name, costs=costs, seconds=times["seconds"])
    return measured, Conditions(**times["conditions"])


def _write(file: Path, numbers: Any) -> None:
    file.write_text(f"{json.dumps(numbers, indent=2)}\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.cost_ablation",
        description="Ranks strategies of small training steps by the cost equation of TAPAS, with "
        "its parts added one by one, and compares the order with that of measured steps on "
        "virtual CPU devices. Prints Markdown.",
        allow_abbrev=False,
    )
    add = result.add_argument
    names = ", ".join(program.name for program in PROGRAMS)
    add("programs", nargs="*", metavar="PROGRAM", help=f"default: all: {names}")
    add("--cluster", required=True, metavar="FILE", help="a calibrated cluster of one host")
    add(
        "--work",
        type=Path,
        required=True,
        metavar="DIR",
        help="keeps plans, costs and seconds; what is there is not made again",
    )
    add("--no-times", action="store_true", help="make the plans only, to be timed later")
    add("--shape", default="2x4", metavar="AxB", help="of the mesh; default: 2x4")
    add("--strategies", type=count, default=8, metavar="N", help="of a program; default: 8")
    add("--seed", type=int, default=0, metavar="N", help="of random strategies; default: 0")
    add("--runs", type=count, default=7, metavar="N", help="steps to measure; default: 7")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 after an error."""
    options = parser().parse_args(arguments)
    known = {program.name: program for program in PROGRAMS}
    if unknown := [name for name in options.programs if name not in known]:
        print(f"error: no program {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    try:
        cluster = Cluster.parse(options.cluster)
        measured_epsilon(cluster.intra_host)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cluster.num_devices)
        found: list[tuple[Measured, Conditions]] = []
        for name in options.programs or known:
            costs = costed(known[name], options)
            if not options.no_times:
                found.append(timed(known[name], list(costs["alpa"]), options))
        if found:
            measured, conditions = zip(*found, strict=True)
            print(f"{text(conditions)}\n\nall strategies:\n\n{table(measured)}\n")
            fewer = [one.without_least_messages() for one in measured]
            print(f"without the one of the least messages:\n\n{table(fewer)}")
    except ClusterError as error:
        print(f"{error.place or 'cost_ablation'}: error: {error.message}", file=sys.stderr)
        return 1
    except ir.MLIRError as error:
        print(format_error(error), file=sys.stderr)
        return 1
    except (LoadError, ValueError) as error:
        print(f"cost_ablation: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: error: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(until_interrupted("cost_ablation", main))
