"""The arguments of `alpa-plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from alpa.dialects.plan import AccumulateDtype
from alpa.passes.schedules.named import NAMES
from alpa.passes.schedules.planned import TERAPIPE
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.remat import Remat
from alpa.runtime.choices import ChoiceError, parse_choice
from alpa.runtime.planning import Inter
from alpa.tools.arguments import (
    add_version,
    compiler_option,
    count,
    count_or_auto,
    dimension_size,
    parse_size,
)
from alpa.tools.exporting import ExportFormat
from alpa.tools.stablehlo_versions import stablehlo_version

VERIFY_CACHE = Path("~/.cache/alpa/verified")
_EXAMPLES = """\
examples:
  alpa-plan step.mlir --cluster h100:1x8 --num-micro-batches 16 -o planned.mlir
  alpa-plan zoo:gpt-2.6b --cluster v100-16gb:8x8 --json plan.json --report plan.html
  alpa-plan zoo:gpt-tiny --cluster cpu:2x4 --batch-size 32 --intra data-parallel --inter none
  alpa-plan zoo:gpt-tiny --cluster cpu:2x4 --batch-size 16 --compare-with-jax
  alpa-plan zoo:gpt-2.6b --cluster v100-16gb:1x8 --num-micro-batches 128 --verify=repair
  alpa-plan --compare a.json b.json --report difference.html
  alpa-plan step.mlir --cluster h100:1x8 --explain 'stage 1' --force-stage 'layers 0-7 on 1x4'
  alpa-plan step.mlir --cluster cpu:1x2 --export stages --export-format vhlo:1.0.0 --strip-sdy
  alpa-plan step.mlir --cluster h100:1x8 -o planned.mlir --export stages \\
      --compiler-option xla_gpu_enable_triton_gemm=false  # executables in stages/executables
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.format_usage()}alpa-plan: error: {message}\n")


def _choice(text: str) -> str:
    """A choice that a plan must have, as `runtime/choices.py` describes it."""
    try:
        parse_choice(text)
    except ChoiceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def export_format(text: str) -> ExportFormat:
    """How stages are written: `xla`, `stablehlo`, `vhlo` or `vhlo:VERSION`."""
    kind, colon, version = text.partition(":")
    if kind == "vhlo":
        return ExportFormat(kind="vhlo", version=stablehlo_version(version) if colon else None)
    if kind in ("xla", "stablehlo") and not colon:
        return ExportFormat(kind=kind)
    raise argparse.ArgumentTypeError(f"{text!r} is not xla, stablehlo, vhlo or vhlo:VERSION")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a command line; an invalid one ends the command with status 1."""
    known = parser()
    options = known.parse_args(arguments)
    given = {"FILE|zoo:NAME": options.program, "--cluster": options.cluster}
    missing = [name for name, value in given.items() if value is None]
    if options.compare is None and missing:
        known.error(f"the following arguments are required: {', '.join(missing)}")
    if options.compare is not None:
        usual = vars(known.parse_args(["--compare", *map(str, options.compare)]))
        others = [name for name, value in vars(options).items() if value != usual[name]]
        others = [
            "the program" if name == "program" else f"--{name.replace('_', '-')}"
            for name in others
            if name != "report"
        ]
        if others:
            known.error(f"--compare plans nothing: leave out {', '.join(others)}")
    return options


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    result = _Parser(
        prog="alpa-plan",
        description="Finds pipeline stages, meshes and shardings for a training step, and prints "
        "the plan with its predictions.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(result)
    add = result.add_argument
    add(
        "program",
        nargs="?",
        metavar="FILE|zoo:NAME",
        help="StableHLO as text, bytecode or portable artifact (- is standard input), or a zoo "
        "program; not with --compare",
    )
    add("--cluster", metavar="C", help="preset:HOSTSxDEVICES, or a TOML file; not with --compare")
    add(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="plan nothing; show how two plans that --json wrote differ, and what each difference "
        "is worth in seconds and bytes; with --report, as an HTML page, too",
    )
    add(
        "--refine",
        action="append",
        default=[],
        type=dimension_size,
        metavar="NAME=SIZE",
        help="the size of a symbolic dimension of a file that jax.export wrote, such as b=8, where "
        "micro-batches have 8 samples; may be repeated",
    )
    add(
        "--num-micro-batches",
        type=count_or_auto,
        metavar="N",
        help="forward and backward runs per update; default: 1 for a file, which must have the "
        "size of one micro-batch; for zoo programs auto, the best divisor of the batch",
    )
    add(
        "--micro-batches",
        choices=["exact", "independent"],
        default="auto",
        help="exact: proven to compute what the whole batch computes, or refused; independent: "
        "each is a batch of its own; default: the program's setting, or exact",
    )
    add(
        "--batch-size",
        type=count,
        metavar="N",
        help="samples per step, for zoo programs; default: that of the model's paper",
    )
    add(
        "--schedule",
        default="auto",
        metavar="|".join(["auto", *NAMES, TERAPIPE, "FILE"]),
        help="order of the micro-batches; auto: the fastest one with a name; terapipe: gpipe with "
        "sequences cut into token slices; FILE: a table of your own; default: auto",
    )
    add(
        "--intra",
        choices=get_args(Intra),
        default="auto",
        help="inside a mesh: auto searches all shardings, tapas does so as TAPAS does, the others "
        "are the paper's baselines; default: auto",
    )
    add(
        "--inter",
        choices=get_args(Inter),
        default="auto",
        help="between meshes: auto searches all cuts; none: one stage; or stages of equally many "
        "layers, or layers of equally many contractions; default: auto",
    )
    add(
        "--num-stages",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="pipeline stages; auto: the number with the shortest predicted step; default: auto",
    )
    add(
        "--num-layers",
        type=count_or_auto,
        default="auto",
        metavar="N",
        help="layers that the program is cut into, and stages consist of; auto: at its markers, or "
        "by its number of contractions; default: auto",
    )
    add(
        "--remat",
        choices=get_args(Remat),
        default="auto",
        help="layers whose activations the backward part computes again: none, every layer, or "
        "where memory requires it (auto); default: auto",
    )
    add(
        "--mesh-shape",
        default="auto",
        metavar="AxB",
        help="logical mesh shape of every stage, such as 4x2; with --inter equal-layers --intra "
        "megatron it gives a manual plan; default: auto",
    )
    add(
        "--no-meshes-over-hosts",
        action="store_true",
        help="keep each mesh inside one host, for Ray on CPU hosts below jax 0.12",
    )
    add(
        "--accumulate-dtype",
        choices=get_args(AccumulateDtype),
        default="f32",
        help="narrowest type that adds up gradients over the micro-batches; same: the type of each "
        "gradient; default: f32",
    )
    add(
        "--objective",
        choices=["step", "throughput"],
        default="step",
        help="what to minimise: the seconds of a step, or, for programs without a backward part, "
        "those of the longest stage; default: step",
    )
    add(
        "--donate-states",
        action="store_true",
        help="each new state takes the place of the old one, also where the program does not "
        "donate that; the arguments are gone after a step",
    )
    add(
        "--costs-folder",
        metavar="DIR",
        default="",
        help="keeps what layers cost on meshes, and reads what an earlier search of the same model "
        "with as many micro-batches and the same schedule has kept; default: none",
    )
    add(
        "--force",
        action="append",
        default=[],
        type=_choice,
        metavar="CHOICE",
        help="an argument's sharding that the plan must have, such as \"state.params['wte'] = "
        '[axis0, -]"; the rest is searched, and the price against the free plan is shown; may be '
        "repeated",
    )
    add(
        "--force-stage",
        dest="force",
        action="append",
        default=[],
        type=_choice,
        metavar="CHOICE",
        help="a stage that the plan must have, such as 'layers 0-7 on 1x8' (hosts x devices) or "
        "'layers 0-7 on 1x8 as 2x4'; as --force otherwise",
    )
    add(
        "--hints",
        type=Path,
        metavar="FILE",
        help="choices that the plan must have, one per line, as --save-hints writes them",
    )
    add(
        "--save-hints",
        type=Path,
        metavar="FILE",
        help="where to write the plan's stages, or its schedule if it has several stages on each "
        "mesh, and the shardings of its arguments as choices",
    )
    add(
        "--explain",
        action="append",
        default=[],
        metavar="WHAT",
        help="say what was chosen for an argument (\"state.params['wte']\"), for what a line of "
        "the program computes (model.py:42) or for a stage ('stage 1'), and what every other "
        "choice would cost, with the rest solved again; may be repeated",
    )
    add("--roles", metavar="ROLES.toml", help="roles of arguments and results")
    add("-o", dest="output", type=Path, metavar="PLANNED.mlir", help="where to write the plan")
    add("--json", type=Path, metavar="PLAN.json", help="where to write the plan's numbers")
    add(
        "--report",
        type=Path,
        metavar="PLAN.html",
        help="where to write the plan as one HTML page, with its timeline, shardings, memory and "
        "costliest communication, which needs the extra report; with --compare: their difference",
    )
    add(
        "--trace",
        type=Path,
        metavar="TRACE.json",
        help="with --report: a trace of the plan's steps, which the page compares with the plan",
    )
    add(
        "--export",
        type=Path,
        metavar="DIR",
        help="where to write each stage's module for XLA, and to DIR/executables its executable, "
        "which alpa.runtime.load(executables=...) reads; for GPUs, executables need no GPU but the "
        "extra gpu-aot",
    )
    add(
        "--export-format",
        type=export_format,
        metavar="FORMAT",
        help="with --export: xla, text for an XLA with Shardy; stablehlo, text without CHLO; or "
        "vhlo[:VERSION], portable artifacts, which compilers with another version of StableHLO "
        "read, by default of jaxlib's version; default: xla",
    )
    add(
        "--strip-sdy",
        action="store_true",
        help="with --export: write modules without Shardy, as programs of one device, for "
        "compilers that do not know it",
    )
    add(
        "--no-executables",
        action="store_true",
        help="with --export: write modules only, without compiling them",
    )
    add(
        "--verify",
        nargs="?",
        choices=["check", "repair"],
        const="check",
        help="compile every stage for the cluster's devices, compare collectives, FLOPs and memory "
        "with the plan's, and say whether each mesh fits; repair: if one does not, plan again with "
        "less memory until all fit; for GPUs, needs no GPU but the extra gpu-aot",
    )
    add(
        "--compiler-option",
        action="append",
        default=[],
        type=compiler_option,
        metavar="NAME=VALUE",
        help="with --verify or --export: one of XLA's options, as in compiler_options of the run; "
        "may be repeated",
    )
    add(
        "--verify-cache",
        type=Path,
        metavar="DIR",
        default=VERIFY_CACHE,
        help="where --verify and --export keep results of equal stages; default: %(default)s",
    )
    add(
        "--compare-with-jax",
        action="store_true",
        help="run one step of the plan on virtual CPU devices, and compare it with plain JAX",
    )
    add(
        "--shrink",
        action="append",
        default=[],
        type=parse_size,
        metavar="N=M",
        help="with --compare-with-jax: replace every size N by M, plan the smaller program with "
        "the same settings, and compare that; may be repeated",
    )
    return result
