"""Puts predicted steps beside those that Alpa's authors measured on V100s.

    python -m alpa.tools.measured_steps gpt-2.6b moe-2.4b

The measurements are of the artifact of the paper (`alpa-projects/alpa`,
`osdi22_artifact/results_e2e.tsv`): seconds of a step, derived from TFLOPS. The models are planned
as theirs were: 1F1B, sums of gradients in the type of the gradients, their numbers of
micro-batches (`suite_artifact_e2e_*.py` there), and for GPT and MoE rematerialised layers. With
`--ranking`, two restricted searches stand beside the whole one, as in the paper's figure 8: one
mesh for all devices (intra-only), and one device per stage (inter-only). They are run as the
authors ran theirs (`benchmark/alpa/exp_intra_only.py`, `exp_inter_only.py`): intra-only on one
logical mesh, for GPT with the batch on its first axis alone; and each with its own numbers of
micro-batches, of which the fastest is kept. The whole search gets all of these numbers, so a
restricted one is never faster: their ratio is that of two searches.

Transfers between meshes go from GPU to GPU, as in the authors' runtime. (Alpa's own takes them
through the memory of the hosts, as the preset says.)

Three numbers are ours. gpt-39b and wresnet-13b are not in the artifact, and gpt-350m does not fit
with 64 micro-batches of 16.

    alpa-calibrate --cpu-devices 4 -o cpu.toml
    python -m alpa.tools.measured_steps --here cpu.toml --stages 1 2

plans the tiny models of the zoo for this machine's devices, runs the plans, and puts predicted
steps beside measured ones (`steps_here.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.cluster_text import cluster_text
from alpa.passes.cost.device import ClusterError, Transfer, seconds_text
from alpa.runtime.planning import PlanningError
from alpa.tools import zoo
from alpa.tools.arguments import count
from alpa.tools.devices import DevicesError
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.search_times import CASES, Case, SearchError, lower, measure_file
from alpa.tools.steps_here import COLUMNS, TINY, CaseHere, conditions, measure_steps


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured step, and the numbers of micro-batches that were tried, or the one of the plan."""

    value: float
    """seconds, or for a restricted search its seconds over those of the whole one"""
    micro_batches: tuple[int, ...]
    options: tuple[str, ...] = ()
    """of `alpa-plan`, that restrict the search as the authors did"""


def _measured(value: float, *micro_batches: int) -> Measured:
    return Measured(value=value, micro_batches=micro_batches)


def _intra_only(value: float, micro_batches: int, *options: str) -> Measured:
    return Measured(
        value=value, micro_batches=(micro_batches,), options=("--inter", "none", *options)
    )


def _inter_only(value: float, *micro_batches: int) -> Measured:
    return Measured(value=value, micro_batches=micro_batches, options=("--mesh-shape", "1"))


_BATCH_FIRST = ("--intra", "megatron-zero2")
"""`FM` and `RS` of the authors' script: the batch on axis 0 alone, and reduce-scattered sums"""


MEASURED = {
    "gpt-350m": _measured(72.9, 128),
    "gpt-1.3b": _measured(50.0, 128),
    "gpt-2.6b": _measured(47.4, 128),
    "gpt-6.7b": _measured(60.0, 64),
    "gpt-15b": _measured(68.9, 128),
    "gpt-39b": _measured(91.2, 128),
    "moe-380m": _measured(36.5, 512),
    "moe-1.3b": _measured(19.2, 32),
    "moe-2.4b": _measured(13.8, 32),
    "moe-10b": _measured(14.5, 16),
    "moe-27b": _measured(14.1, 128),
    "wresnet-250m": _measured(44.4, 24),
    "wresnet-1b": _measured(45.0, 24),
    "wresnet-2b": _measured(44.8, 24),
    "wresnet-4b": _measured(54.3, 32),
    "wresnet-6.8b": _measured(45.9, 32),
    "wresnet-13b": _measured(57.6, 48),
}

_NVLINK = Transfer(bandwidth=20e9, latency=1e-5)
"""One of a V100's six links, as NCCL counts them; between two V100s there are one or two."""

RANKED: dict[str, dict[str, Measured]] = {
    "gpt-1.3b": {
        "intra-only": _intra_only(1.00, 64, "--mesh-shape", "4x1", *_BATCH_FIRST),
        "inter-only": _inter_only(1.08, 64, 128),
    },
    "gpt-2.6b": {
        "intra-only": _intra_only(1.21, 32, "--mesh-shape", "4x2", *_BATCH_FIRST),
        "inter-only": _inter_only(1.09, 64, 128),
    },
    "gpt-6.7b": {
        "intra-only": _intra_only(1.24, 64, "--mesh-shape", "2x8", *_BATCH_FIRST),
        "inter-only": _inter_only(1.01, 128, 256),
    },
    "moe-1.3b": {
        "intra-only": _intra_only(0.97, 16, "--mesh-shape", "4"),
        "inter-only": _inter_only(1.05, 64, 128),
    },
    "moe-2.4b": {
        "intra-only": _intra_only(0.98, 16, "--mesh-shape", "8"),
        "inter-only": _inter_only(1.13, 64, 128),
    },
    "wresnet-4b": {"intra-only": _intra_only(1.43, 64, "--mesh-shape", "2x8")},
}
"""By restricted search. Of inter-only's numbers of micro-batches, the first two."""

_RESTRICTED = ("intra-only", "inter-only")
_EXAMPLES = """\
examples:
  python -m alpa.tools.measured_steps gpt-350m moe-380m
  python -m alpa.tools.measured_steps --ranking gpt-2.6b
  python -m alpa.tools.measured_steps --here cpu.toml --stages 1 2 gpt-tiny
"""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A planned model beside its measurement."""

    program: str
    cluster: str
    measured: float
    """seconds"""
    predicted: float
    """seconds"""
    fastest: float
    """seconds, predicted, with any of the restricted searches' numbers of micro-batches, too"""
    restricted: dict[str, float | None]
    """predicted seconds of restricted searches; None if nothing was found"""

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def predict(program: str, *, ranking: bool = False) -> Step:
    """Plans a model as Alpa's authors did.

    Raises:
        SearchError: it cannot be lowered or planned.
    """
    measured = MEASURED[program]
    restricted: dict[str, float | None] = {}
    found = best = fastest(program, measured.micro_batches, [])
    ranked = RANKED.get(program, {}) if ranking else {}
    for name, one in ranked.items():
        try:
            restricted[name] = fastest(program, one.micro_batches, one.options)
        except SearchError as error:
            print(f"{program}, {name}: {error}", file=sys.stderr)
            restricted[name] = None
    numbers = {number for one in ranked.values() for number in one.micro_batches}
    if others := sorted(numbers - {*measured.micro_batches}):
        best = min(best, fastest(program, others, []))
    return Step(
        program=program,
        cluster=_case(program, measured.micro_batches[0]).cluster,
        measured=measured.value,
        predicted=found,
        fastest=best,
        restricted=restricted,
    )


def fastest(program: str, micro_batches: Sequence[int], options: Sequence[str]) -> float:
    """Seconds of the fastest plan with one of these numbers of micro-batches.

    Args:
        options: of `alpa-plan`.

    Raises:
        SearchError: the model cannot be lowered, or planned with none of them.
    """
    common = [] if program.startswith("wresnet") else ["--remat", "layer"]
    seconds: list[float] = []
    problems: list[str] = []
    for number in micro_batches:
        case = _case(program, number)
        with tempfile.TemporaryDirectory() as folder:
            file, cluster = Path(folder) / f"{program}.mlir", Path(folder) / "cluster.toml"
            lower(case, file)
            cluster.write_text(from_gpu_to_gpu(case.cluster), encoding="utf-8")
            case = replace(case, cluster=str(cluster))
            try:
                times = measure_file(file, case, schedule="1f1b", options=[*common, *options])
            except SearchError as error:
                problems.append(f"{number} micro-batches: {error}")
            else:
                seconds.append(times.step_seconds)
    if not seconds:
        raise SearchError("; ".join(problems))
    return min(seconds)


def from_gpu_to_gpu(cluster: str) -> str:
    """The file of a cluster where transfers between meshes use the links between devices."""
    known = Cluster.parse(cluster)
    links = replace(known.intra_host, transfer=_NVLINK), replace(known.inter_host, transfer=None)
    return cluster_text(replace(known, intra_host=links[0], inter_host=links[1]))


def _case(program: str, micro_batches: int) -> Case:
    """A model of `search_times` with the presets' figures, the same batch and the authors' sums."""
    case = CASES[program]
    return replace(
        case,
        cluster=case.cluster.removesuffix(",ideal"),
        micro_batch_size=case.micro_batch_size * case.num_micro_batches // micro_batches,
        num_micro_batches=micro_batches,
        accumulate_dtype="same",
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.measured_steps",
        description="Plans the models that Alpa's authors measured on V100s, and prints predicted "
        "beside measured seconds of a step, as Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("programs", nargs="*", metavar="MODEL", help=f"default: all: {', '.join(MEASURED)}")
    add(
        "--ranking",
        action="store_true",
        help=f"also search with intra- or inter-op parallelism only: {', '.join(RANKED)}",
    )
    add(
        "--here",
        metavar="CLUSTER.toml",
        help="run the plans on this machine's devices, which alpa-calibrate has measured; default "
        f"models: {', '.join(TINY)}",
    )
    add(
        "--stages",
        type=count,
        nargs="+",
        default=[1],
        metavar="N",
        help="with --here, numbers of stages; several stages run 4 micro-batches; default: 1",
    )
    add("--runs", type=count, default=21, metavar="N", help="with --here, timed steps of each plan")
    add("--json", type=Path, metavar="FILE", help="where to write the numbers")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 if a model could not be planned."""
    options = parser().parse_args(arguments)
    known = MEASURED if options.here is None else zoo.names()
    if unknown := [name for name in options.programs if name not in known]:
        print(f"error: no model {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    if options.here is not None:
        return _here(options)
    steps: list[Step] = []
    problems: list[str] = []
    columns = ["model", "cluster", "measured", "predicted", "ratio"]
    columns += [f"{name}, {kind}" for name in _RESTRICTED for kind in ("measured", "predicted")]
    with until_the_reader_goes():
        print(markdown_header(columns if options.ranking else columns[:5]), flush=True)
        for program in options.programs or MEASURED:
            try:
                step = predict(program, ranking=options.ranking)
            except SearchError as error:
                problems.append(f"{program}: {error}")
            else:
                steps.append(step)
                print(markdown_row(_cells(step, ranking=options.ranking)), flush=True)
        if steps:
            errors = [abs(step.ratio - 1) for step in steps]
            print(f"\nerror: median {median(errors):.0%}, largest {max(errors):.0%}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if options.json is not None:
        text = json.dumps([asdict(step) for step in steps], indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 1 if problems else 0


def _here(options: argparse.Namespace) -> int:
    """Prints the table of this machine, and returns the exit status."""
    cases = [
        CaseHere(program=program, num_stages=stages, num_micro_batches=1 if stages == 1 else 4)
        for stages in options.stages
        for program in options.programs or TINY
    ]
    before = os.getloadavg()[0]
    try:
        steps = measure_steps(cases, options.here, runs=options.runs)
    except (ClusterError, DevicesError, PlanningError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with until_the_reader_goes():
        print(markdown_header(COLUMNS))
        for step in steps:
            print(markdown_row(step.cells()))
        errors = [abs(step.ratio - 1) for step in steps]
        print(f"\nerror: median {median(errors):.0%}, largest {max(errors):.0%}")
        print(conditions(before))
    if options.json is not None:
        text = json.dumps([asdict(step) for step in steps], indent=2)
        options.json.write_text(f"{text}\n", encoding="utf-8")
    return 0


def _cells(step: Step, *, ranking: bool) -> list[str]:
    cells = [step.program, step.cluster, seconds_text(step.measured)]
    cells += [seconds_text(step.predicted), f"{step.ratio:.2f}"]
    for name in _RESTRICTED if ranking else ():
        measured, predicted = RANKED.get(step.program, {}).get(name), step.restricted.get(name)
        cells.append("" if measured is None else f"{measured.value:.2f}")
        cells.append("" if predicted is None else f"{predicted / step.fastest:.2f}")
    return cells


if __name__ == "__main__":
    sys.exit(until_interrupted("measured_steps", main))
