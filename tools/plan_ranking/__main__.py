"""Compares the cost model's order of plans with that of their times.

    python -m alpa.tools.plan_ranking --cluster h100:1x8
    python -m alpa.tools.plan_ranking --measure --cluster calibrated.toml

Each program is planned ten times: by the search, by the baselines, with two stages, and with random
shardings. The model predicts the seconds of a step of each plan. They are compared with a roofline
over the programs that the GPUs' compiler makes of the plan's stages (the extra `gpu-aot`; no GPU is
needed), or with measured steps on virtual CPU devices, whose meshes take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax

from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import seconds_text
from alpa.runtime.ahead_of_time.compilation import CompilationError
from alpa.runtime.hlo_text import HloError
from alpa.runtime.loading import LoadError
from alpa.runtime.planning import PlanningError
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.plan_ranking.plans import distinct_plans
from alpa.tools.plan_ranking.programs import FOR_CPU, FOR_GPUS, RankedProgram
from alpa.tools.plan_ranking.scores import Ranking, Times, accuracy, mean_reciprocal_rank
from alpa.tools.plan_ranking.times import (
    measured_seconds,
    predicted_in_turns,
    predicted_seconds,
    roofline_seconds,
)
from alpa.tools.programs import lowered

_EXAMPLES = """\
examples:
  python -m alpa.tools.plan_ranking gpt-2048 mlp-8192 --cluster h100:1x8 --cache hlo/
  alpa-calibrate --cpu-devices 8 -o calibrated.toml
  python -m alpa.tools.plan_ranking --measure --cluster calibrated.toml --json ranking.json
"""


def rank(program: RankedProgram, options: argparse.Namespace) -> Ranking:
    """Plans a program and times its plans.

    Raises:
        PlanningError, ValueError: there are too few plans.
        CompilationError, HloError, LoadError: they cannot be timed.
    """
    module = lowered(program.training(), program.micro_batch_size)
    plans = distinct_plans(
        module, options.cluster, program.num_micro_batches, count=options.plans, seed=options.seed
    )
    if options.measure:
        predicted = [predicted_in_turns(plan) for plan in plans]
        seconds = measured_seconds(program, plans, runs=options.runs)
    else:
        predicted = [predicted_seconds(plan) for plan in plans]
        seconds = roofline_seconds(plans, processes=options.processes, cache=options.cache)
    return Ranking(
        program=program.name,
        plans=tuple(
            Times(name=plan.name, predicted=one, real=real)
            for plan, one, real in zip(plans, predicted, seconds, strict=True)
        ),
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.plan_ranking",
        description="Plans programs in ten ways each, and compares the predicted order of the "
        "plans with that of their times: mean reciprocal rank (MRR) of the best plan, and how "
        "often it is among the first k (Acc@k). Plans within 5 % of the shortest time count as "
        "best. Prints Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    names = [[program.name for program in programs] for programs in (FOR_GPUS, FOR_CPU)]
    add(
        "programs",
        nargs="*",
        metavar="PROGRAM",
        help=f"default: all: {', '.join(names[0])}; with --measure: {', '.join(names[1])}",
    )
    add("--cluster", required=True, metavar="C", help="preset:HOSTSxDEVICES, or a TOML file")
    add(
        "--measure",
        action="store_true",
        help="run the plans on virtual CPU devices, as many as the cluster has; default: a "
        "roofline over what the GPUs' compiler makes of them",
    )
    add("--plans", type=count, default=10, metavar="N", help="plans of a program; default: 10")
    add("--seed", type=int, default=0, metavar="N", help="of the random plans; default: 0")
    add("--runs", type=count, default=5, metavar="N", help="steps to measure; default: 5")
    add("--processes", type=count, metavar="N", help="compilers at a time; default: one per core")
    add("--cache", type=Path, metavar="DIR", help="keeps the compiler's programs for later runs")
    add("--json", type=Path, metavar="FILE", help="where to write the seconds of all plans")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 after an error."""
    options = parser().parse_args(arguments)
    known = {program.name: program for program in (FOR_CPU if options.measure else FOR_GPUS)}
    if unknown := [name for name in options.programs if name not in known]:
        print(f"error: no program {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    rankings: list[Ranking] = []
    try:
        devices = Cluster.parse(options.cluster).num_devices
        # Otherwise CUDA's plug-in, which compiles in other processes, complains in this one.
        jax.config.update("jax_platforms", "cpu")
        if options.measure:
            jax.config.update("jax_num_cpu_devices", devices)
        with until_the_reader_goes():
            columns = ["program", "rank", "1/rank", "predicted best", "best", "loss"]
            print(markdown_header(columns), flush=True)
            for name in options.programs or known:
                rankings.append(rank(known[name], options))
                print(markdown_row(_cells(rankings[-1])), flush=True)
            print(f"\n{summary(rankings)}", flush=True)
        if options.json is not None:
            numbers = [asdict(one) for one in rankings]
            options.json.write_text(f"{json.dumps(numbers, indent=2)}\n", encoding="utf-8")
    except ClusterError as error:
        print(f"{error.place or 'plan_ranking'}: error: {error.message}", file=sys.stderr)
        return 1
    except PlanningError as error:
        print(error, file=sys.stderr)
        return 1
    except (CompilationError, HloError, LoadError, ValueError) as error:
        print(f"plan_ranking: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: error: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def summary(rankings: Sequence[Ranking]) -> str:
    """The means over all programs."""
    shares = [f"Acc@{k} {accuracy(rankings, k):.2f}" for k in (1, 5)]
    return (
        f"MRR {mean_reciprocal_rank(rankings):.3f}, {', '.join(shares)}, {len(rankings)} programs"
    )


def _cells(ranking: Ranking) -> list[str]:
    both = (ranking.predicted_best, ranking.best)
    return [
        ranking.program,
        str(ranking.rank),
        f"{1 / ranking.rank:.2f}",
        *(f"{it.name}: {seconds_text(it.predicted)}, {seconds_text(it.real)}" for it in both),
        f"{ranking.loss:.1%}",
    ]


if __name__ == "__main__":
    sys.exit(until_interrupted("plan_ranking", main))
