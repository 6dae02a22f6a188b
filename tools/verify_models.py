"""Verifies plans of the paper's models and of files for GPUs that are not here; prints a table.

    python -m alpa.tools.verify_models gpt-350m moe-380m --gpu h100
    python -m alpa.tools.verify_models step.mlir --shape 2x8

A model of the paper is planned for the paper's number of GPUs, a file for one host of eight, and
every stage is compiled by XLA for that GPU (`alpa-plan --verify=repair`, with the extra `gpu-aot`).
If a plan does not fit, the program is planned again with less memory. Equal stages are compiled
once, so that one module of each distinct kind is verified.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import seconds_text, size_text
from alpa.tools.alpa_plan_arguments import VERIFY_CACHE
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.search_times import CASES, Case, SearchError, lower

MODELS = [name for name, case in CASES.items() if Cluster.parse(case.cluster).num_devices <= 8]
"""Those that are verified if none is named."""
GPUS = ("v100-16gb", "h100")
_SHAPE_OF_FILES = "1x8"
_NEAR, _SLACK = 0.1, 2**20
_EXAMPLES = """\
examples:
  python -m alpa.tools.verify_models
  python -m alpa.tools.verify_models gpt-2.6b --gpu a100-40gb --gpu h100
  python -m alpa.tools.verify_models gpt-39b wresnet-13b --gpu v100-16gb
  python -m alpa.tools.verify_models step.mlir --shape 2x8 --num-micro-batches 16
"""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A verified plan's numbers."""

    step_seconds: float
    rounds: int
    """plans that were searched until one fitted"""
    fits: bool
    fullest: tuple[int, int, int]
    """predicted, compiled and usable bytes of the mesh with the least left, as compiled"""
    modules: dict[str, tuple[int, int]]
    """predicted and compiled bytes of each module"""
    sent: tuple[int, int]
    """predicted and compiled bytes of all collectives"""

    @property
    def near(self) -> int:
        """How many modules' memory was predicted within 10 %, or 1 MiB."""
        return sum(_is_near(a, b) for a, b in self.modules.values())

    @classmethod
    def read(cls, numbers: dict[str, Any], rounds: int) -> Verified:
        """Of the JSON that `alpa-plan --verify` writes."""
        found = numbers["verification"]
        meshes = [
            (it["predicted_bytes"] or 0, it["compiled_bytes"], it["usable_bytes"])
            for it in found["meshes"]
        ]
        payloads = [both for it in found["modules"] for both in it["payload_bytes"].values()]
        return cls(
            step_seconds=numbers["predicted_step_seconds"],
            rounds=rounds,
            fits=found["fits"],
            fullest=min(meshes, key=lambda mesh: mesh[2] - mesh[1]),
            modules={
                it["name"]: (it["memory"]["predicted"]["peak"], it["memory"]["real"]["peak"])
                for it in found["modules"]
            },
            sent=(
                sum(both["predicted"] for both in payloads),
                sum(both["real"] for both in payloads),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A program to verify on a number of hosts and of devices in each."""

    name: str
    shape: str
    num_micro_batches: int
    case: Case | None = None
    file: Path | None = None
    """if it is no case"""

    @classmethod
    def named(cls, text: str, *, shape: str | None, num_micro_batches: int | None) -> Subject:
        """The model of the paper of that name, or the file at that path; with the paper's or the
        file's defaults for what is None.

        Raises:
            SearchError: there is neither.
        """
        if text in CASES:
            case = CASES[text]
            paper = Cluster.parse(case.cluster)
            return cls(
                name=text,
                shape=shape or f"{paper.hosts}x{paper.devices_per_host}",
                num_micro_batches=num_micro_batches or case.num_micro_batches,
                case=case,
            )
        file = Path(text)
        if not file.is_file():
            raise SearchError(
                f"no model and no file {text}; pass the path of a StableHLO program, or one of "
                f"{', '.join(CASES)}"
            )
        return cls(
            name=file.stem,
            shape=shape or _SHAPE_OF_FILES,
            num_micro_batches=num_micro_batches or 1,
            file=file,
        )

    @contextmanager
    def program(self) -> Generator[Path]:
        """The file of the program; that of a case exists in the block only.

        Raises:
            SearchError: the case cannot be lowered.
        """
        if self.file is not None:
            yield self.file
        elif self.case is not None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{self.name}.mlir"
                lower(self.case, file)
                yield file


def verify(subject: Subject, gpu: str, cache: Path) -> Verified:
    """Plans and verifies a program.

    Raises:
        SearchError: it cannot be lowered, planned or compiled.
    """
    with subject.program() as file, tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "alpa.tools.alpa_plan", str(file)]
        command += ["--cluster", f"{gpu}:{subject.shape}", "--schedule", "1f1b"]
        command += ["--num-micro-batches", str(subject.num_micro_batches)]
        if subject.case is not None:
            command += ["--accumulate-dtype", subject.case.accumulate_dtype]
        command += ["--verify=repair", "--verify-cache", str(cache), "--json", str(numbers)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if not numbers.exists():
            lines = run.stderr.strip().splitlines() or [f"alpa-plan ended with {run.returncode}"]
            raise SearchError(next((line for line in lines if ": error: " in line), lines[-1]))
        rounds = 1 + run.stderr.count("planning again with")
        return Verified.read(json.loads(numbers.read_text(encoding="utf-8")), rounds)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.verify_models",
        description="Plans the paper's models, or programs in files, for GPUs that are not here, "
        "has XLA compile every stage, and prints predicted beside compiled memory and collectives, "
        "as Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add(
        "programs",
        nargs="*",
        metavar="MODEL|FILE",
        help=f"{', '.join(CASES)}; or the path of a program, which must have the size of one "
        "micro-batch; default: the models that need at most one host",
    )
    add(
        "--gpu",
        action="append",
        metavar="PRESET",
        help=f"may be repeated; default: {' and '.join(GPUS)}",
    )
    add(
        "--shape",
        metavar="HOSTSxDEVICES",
        help=f"default: the paper's for a model, {_SHAPE_OF_FILES} for a file",
    )
    add(
        "--num-micro-batches",
        type=count,
        metavar="N",
        help="default: the paper's for a model, 1 for a file",
    )
    add(
        "--verify-cache",
        type=Path,
        default=VERIFY_CACHE,
        metavar="DIR",
        help="where results of equal stages are kept; default: %(default)s",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 if a program does not fit, or cannot be
    planned or compiled."""
    options = parser().parse_args(arguments)
    try:
        subjects = [
            Subject.named(text, shape=options.shape, num_micro_batches=options.num_micro_batches)
            for text in options.programs or MODELS
        ]
    except SearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cache = options.verify_cache.expanduser()
    fine = True
    columns = ["program", "cluster", "predicted step", "plans", "predicted", "compiled", "usable"]
    columns += ["", "modules within 10 %", "collectives, predicted / compiled"]
    far: list[str] = []
    with until_the_reader_goes():
        print(markdown_header(columns), flush=True)
        for gpu in options.gpu or GPUS:
            for subject in subjects:
                named = [subject.name, f"{gpu}:{subject.shape}"]
                try:
                    found = verify(subject, gpu, cache)
                except SearchError as error:
                    fine = False
                    print(markdown_row([*named, f"error: {error}"]), flush=True)
                else:
                    fine &= found.fits
                    print(markdown_row([*named, *_cells(found)]), flush=True)
                    far += [f"{' on '.join(named)}, {line}" for line in _far(found)]
        if far:
            print("\nmodules off by more than 10 %, predicted and compiled:")
            print("\n".join(f"* {line}" for line in far))
    return 0 if fine else 1


def _cells(found: Verified) -> list[str]:
    predicted, real = found.sent
    return [
        seconds_text(found.step_seconds),
        str(found.rounds),
        *map(size_text, found.fullest),
        "fits" if found.fits else "does not fit",
        f"{found.near} of {len(found.modules)}",
        f"{predicted / real:.3f}" if real else "none",
    ]


def _is_near(predicted: int, real: int) -> bool:
    return abs(predicted - real) <= max(_NEAR * real, _SLACK)


def _far(found: Verified) -> Iterator[str]:
    for name, (predicted, real) in found.modules.items():
        if not _is_near(predicted, real):
            yield f"{name}: {size_text(predicted)}, {size_text(real)}"


if __name__ == "__main__":
    sys.exit(until_interrupted("verify_models", main))
