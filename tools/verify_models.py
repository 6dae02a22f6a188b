"""Verifies plans of the paper's models for GPUs that are not here, and prints a table.

    python -m alpa.tools.verify_models gpt-350m moe-380m --gpu h100

Each model is planned for as many GPUs of one host as in the paper, and every stage is compiled by
XLA for that GPU (`alpa-plan --verify=repair`, with the extra `gpu-aot`). If a plan does not fit,
the model is planned again with less memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import size_text
from alpa.passes.plan.text import seconds_text
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.search_times import CASES, Case, SearchError, lower

MODELS = [name for name, case in CASES.items() if Cluster.parse(case.cluster).num_devices <= 8]
GPUS = ("v100-16gb", "h100")
_NEAR, _SLACK = 0.1, 2**20
_EXAMPLES = """\
examples:
  python -m alpa.tools.verify_models
  python -m alpa.tools.verify_models gpt-2.6b --gpu a100-40gb --gpu h100
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


def verify(case: Case, cluster: str) -> Verified:
    """Plans and verifies a model.

    Raises:
        SearchError: it cannot be lowered, planned or compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, numbers = Path(folder) / f"{case.program}.mlir", Path(folder) / "plan.json"
        lower(case, file)
        command = [sys.executable, "-m", "alpa.tools.alpa_plan", str(file), "--cluster", cluster]
        command += ["--num-micro-batches", str(case.num_micro_batches), "--schedule", "1f1b"]
        command += ["--verify=repair", "--json", str(numbers)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if not numbers.exists():
            raise SearchError(run.stderr.strip().splitlines()[-1])
        rounds = 1 + run.stderr.count("planning again with")
        return Verified.read(json.loads(numbers.read_text(encoding="utf-8")), rounds)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.verify_models",
        description="Plans the paper's models for one host of GPUs, has XLA compile every stage, "
        "and prints predicted beside compiled memory and collectives, as Markdown.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("programs", nargs="*", metavar="MODEL", help=f"default: all: {', '.join(MODELS)}")
    add(
        "--gpu",
        action="append",
        metavar="PRESET",
        help=f"may be repeated; default: {' and '.join(GPUS)}",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 1 if a model does not fit, or cannot be
    planned or compiled."""
    options = parser().parse_args(arguments)
    if unknown := [name for name in options.programs if name not in MODELS]:
        print(f"error: no model {unknown[0]}; there are {', '.join(MODELS)}", file=sys.stderr)
        return 1
    fine = True
    columns = ["model", "cluster", "predicted step", "plans", "predicted", "compiled", "usable"]
    columns += ["", "modules within 10 %", "collectives, predicted / compiled"]
    far: list[str] = []
    with until_the_reader_goes():
        print(markdown_header(columns), flush=True)
        for gpu in options.gpu or GPUS:
            for name in options.programs or MODELS:
                case = CASES[name]
                cluster = f"{gpu}:1x{Cluster.parse(case.cluster).num_devices}"
                try:
                    found = verify(case, cluster)
                except SearchError as error:
                    fine = False
                    print(markdown_row([name, cluster, f"error: {error}"]), flush=True)
                else:
                    fine &= found.fits
                    print(markdown_row([name, cluster, *_cells(found)]), flush=True)
                    far += [f"{name} on {cluster}, {line}" for line in _far(found)]
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
    sys.exit(main())
