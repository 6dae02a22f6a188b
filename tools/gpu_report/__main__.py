"""Tests and measures Alpa on this machine's first GPU, and prints the results as Markdown.

    python -m alpa.tools.gpu_report --output report.md

1. `alpa-calibrate` measures the GPU, beside the nearest preset, and writes a cluster file.
2. Training steps of a GPT, a mixture of experts and a Wide-ResNet in bf16, planned for this file,
   beside `jax.jit`: losses, the ratio of the seconds, and the predicted seconds.
3. A GPT on two meshes that share the GPU, for each transport: results beside plain JAX, a
   checkpoint, and the speed of large tiles.

Each part has processes of its own, so that no part holds memory that another one needs. The exit
status is 1 if a comparison fails or a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.workers import Workers
from alpa.tools.gpu_report.machine import calibrate, machine
from alpa.tools.gpu_report.meshes import try_meshes
from alpa.tools.gpu_report.report import Report
from alpa.tools.gpu_report.steps import MODELS, TINY_MODELS, StepTimes, time_model
from alpa.tools.interrupts import until_interrupted

P = ParamSpec("P")
T = TypeVar("T")

PARTS = ("calibration", "steps", "meshes")
_TILE_BYTES = 64 << 20
_LAST = 15
"""Lines of a failed part's output to show."""
_EXAMPLES = """\
examples:
  python -m alpa.tools.gpu_report --output report.md
  python -m alpa.tools.gpu_report --part meshes --quick     one part, with small models
  python -m alpa.tools.gpu_report --devices cpu --quick     tries the command without a GPU
"""


class PartError(Exception):
    """A part of the report has failed; `str` is the reason."""


def run_part(
    environment: Mapping[str, str], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Calls a function in a process of its own.

    Raises:
        PartError: it fails, or its process ends.
    """
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        file = Path(log.name)
        try:
            with Workers(1, environment=environment, log=file) as workers:
                return workers.submit(function, *args, **kwargs).result()
        except (SolverFailedError, RuntimeError, ValueError, ArithmeticError) as error:
            lines = file.read_text(errors="replace").splitlines()[-_LAST:]
            said = [f"  {line}" for line in lines] if isinstance(error, SolverFailedError) else []
            raise PartError("\n".join([str(error), *said])) from error


def report(parts: Sequence[str], cluster_file: Path, *, on_cpu: bool, quick: bool) -> Report:
    """Runs the parts, one after the other; failures are in the report.

    Raises:
        PartError: there is no such device.
    """
    device = _environment(on_cpu=on_cpu)
    _say("device and versions")
    found = Report(
        machine=run_part(device, machine, on_cpu=on_cpu), judges_seconds=not (on_cpu or quick)
    )
    found = replace(found, cluster=f"{found.machine.preset}:1x1")
    failures: dict[str, str] = {}
    if "calibration" in parts:
        _say("calibration")
        try:
            text = run_part(device, calibrate, cluster_file, on_cpu=on_cpu, quick=quick)
            found = replace(found, calibration=text, cluster=str(cluster_file), is_calibrated=True)
        except PartError as error:
            failures["calibration"] = str(error)
    if "steps" in parts:
        _say("training steps")
        models = TINY_MODELS if on_cpu or quick else MODELS
        rounds, steps = (3, 2) if on_cpu or quick else (7, 10)
        times: list[StepTimes] = []
        for model in models:
            _say(f"  {model.program}")
            try:
                times.append(
                    run_part(device, time_model, model, found.cluster, rounds=rounds, steps=steps)
                )
            except PartError as error:
                failures[model.program] = str(error)
        found = replace(found, steps=times)
    if "meshes" in parts:
        _say("two meshes")
        caller = {**device, "JAX_PLATFORMS": "cpu"}
        try:
            meshes = run_part(
                caller,
                try_meshes,
                ("auto", "tcp", "jax"),
                "cpu" if on_cpu else "gpu",
                _TILE_BYTES // 16 if on_cpu else _TILE_BYTES,
            )
            found = replace(found, meshes=meshes)
        except PartError as error:
            failures["meshes"] = str(error)
    return replace(found, failures=failures)


def _environment(*, on_cpu: bool) -> dict[str, str]:
    """Variables of a part's process, which sees one device."""
    if on_cpu:
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [it for it in flags if "xla_force_host_platform_device_count" not in it]
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(kept)}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {
        "JAX_PLATFORMS": "",
        "CUDA_VISIBLE_DEVICES": first,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def _say(what: str) -> None:
    print(f"gpu_report: {what} ...", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.gpu_report",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--output", type=Path, metavar="REPORT.md", help="also write the report to this file")
    add(
        "--cluster-file",
        type=Path,
        metavar="CLUSTER.toml",
        default=Path("cluster.toml"),
        help="where the calibrated device is written; default: %(default)s",
    )
    add(
        "--part",
        action="append",
        choices=PARTS,
        help="may be repeated; default: all. Without calibration, the nearest preset is planned "
        "for, and predictions do not count",
    )
    add(
        "--devices",
        choices=("gpu", "cpu"),
        default="gpu",
        help="cpu: tiny models on virtual CPU devices, whose seconds do not count",
    )
    add(
        "--quick",
        action="store_true",
        help="tiny models and few samples, whose seconds do not count",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 for an error, a comparison that fails or
    a bar that is missed."""
    options = parser().parse_args(arguments)
    for file in (options.output, options.cluster_file):
        if file is not None and not file.absolute().parent.is_dir():
            print(f"gpu_report: error: there is no folder for {file}", file=sys.stderr)
            return 1
    try:
        found = report(
            options.part or PARTS,
            options.cluster_file,
            on_cpu=options.devices == "cpu",
            quick=options.quick,
        )
    except PartError as error:
        print(f"gpu_report: error: {error}", file=sys.stderr)
        return 1
    text = found.markdown()
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    return 1 if found.misses() else 0


if __name__ == "__main__":
    sys.exit(until_interrupted("gpu_report", main))
