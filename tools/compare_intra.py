"""Compares the full search with the paper's intra-operator baselines (section 8.2, figure 8).

    python -m alpa.tools.compare_intra gpt-2.6b moe-2.4b --cluster v100-16gb:1x8

Every zoo model is one stage on the whole cluster. One cost model evaluates all values of `intra`,
within the device's memory.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from alpa import passes
from alpa.dialects import ir, main_function
from alpa.dialects.plan import read_solver_reports
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import size_text
from alpa.passes.pipelines.diagnostics import format_error
from alpa.passes.sharding.baselines import Intra
from alpa.tools import zoo
from alpa.tools.interrupts import until_interrupted

INTRA: tuple[str, ...] = get_args(Intra)
_NEEDS = re.compile(r"needs (?:at least )?(\S+ \S+) per device")
_PARTITION = (
    "simplify-trivial-ops,layer-cluster{{num-layers=1}},stage-mesh-partition"
    "{{cluster={cluster} num-stages=1 num-micro-batches={batches} schedule=1f1b}}"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one value of `intra`; seconds and bytes are None if memory is too small."""

    intra: str
    seconds: float | None
    gap: float | None
    peak_bytes: int | None
    needs: str | None
    """the bytes needed, if memory is too small"""
    search_seconds: float

    @property
    def text(self) -> str:
        if self.seconds is None:
            return f"out of memory ({self.needs})"
        return f"{self.seconds:.4g} s, {size_text(self.peak_bytes or 0)}"


def compare(
    program: str, *, micro_batch_size: int, global_batch: int, cluster: str, intra: Sequence[str]
) -> Iterator[Outcome]:
    """Yields the outcome of each value of `intra`, one by one.

    Raises:
        ir.MLIRError: the program cannot be planned, for another reason than memory.
    """
    batches = max(1, global_batch // micro_batch_size)
    planned = str(
        passes.run(
            zoo.get(program).lower(micro_batch_size),
            _PARTITION.format(cluster=cluster, batches=batches),
        )
    )
    for value in intra:
        start = time.monotonic()
        try:
            module = passes.run(
                planned, f"place-gradient-reductions,ilp-shard-annotate{{intra={value}}}"
            )
        except ir.MLIRError as error:
            needs = _NEEDS.search(str(error))
            if needs is None:
                raise
            yield Outcome(
                intra=value,
                seconds=None,
                gap=None,
                peak_bytes=None,
                needs=needs[1],
                search_seconds=time.monotonic() - start,
            )
            continue
        (report,) = read_solver_reports(main_function(module))
        yield Outcome(
            intra=value,
            seconds=report.objective,
            gap=report.gap,
            peak_bytes=report.peak_bytes,
            needs=None,
            search_seconds=time.monotonic() - start,
        )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.compare_intra",
        description="Compares the search inside a mesh with the baselines of the paper: predicted "
        "seconds per step and peak bytes per device. Prints Markdown.",
        epilog="example: python -m alpa.tools.compare_intra gpt-350m --cluster v100-16gb:1x8 "
        "--micro-batch-size 8",
    )
    result.add_argument("programs", nargs="+", metavar="MODEL", help="a zoo model, e.g. gpt-2.6b")
    result.add_argument("--cluster", default="v100-16gb:1x8", help="default: v100-16gb:1x8")
    result.add_argument(
        "--global-batch", type=int, default=1024, metavar="N", help="samples per step; default 1024"
    )
    result.add_argument(
        "--micro-batch-size", type=int, default=8, metavar="N", help="samples at a time; default 8"
    )
    result.add_argument(
        "--intra",
        action="append",
        choices=INTRA,
        help="what to compare; may be repeated; default: all",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    values = options.intra or list(INTRA)
    if options.micro_batch_size < 1 or options.global_batch % options.micro_batch_size:
        print(
            f"error: a batch of {options.global_batch} cannot be cut into micro-batches of "
            f"{options.micro_batch_size}",
            file=sys.stderr,
        )
        return 1
    try:
        Cluster.parse(options.cluster)
        print(f"| model | {' | '.join(values)} |")
        print(f"|---|{'---|' * len(values)}")
        for program in options.programs:
            print(f"| {program} |", end="", flush=True)
            for outcome in compare(
                program,
                micro_batch_size=options.micro_batch_size,
                global_batch=options.global_batch,
                cluster=options.cluster,
                intra=values,
            ):
                print(f" {outcome.text} |", end="", flush=True)
            print()
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ir.MLIRError as error:
        print(f"\n{format_error(error)}", file=sys.stderr)
        return 1
    except (KeyError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(until_interrupted("compare_intra", main))
