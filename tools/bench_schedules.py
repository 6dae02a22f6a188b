"""Compares measured steps of two schedules with the predicted ones.

    RAY_worker_niceness=0 python -m alpa.tools.bench_schedules --num-micro-batches 4

Trains a chain of dense layers on Ray, on two meshes of one CPU device, each pinned to its own core,
under one schedule after the other, and again in several rounds. The fastest step of each counts,
because other work on the machine only makes steps longer. The cost model's seconds are those of
another machine, so that only the ratio of two steps can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from alpa.passes.schedules.named import NAMES
from alpa.tools.arguments import count
from alpa.tools.bench_overhead import Chain, Measured, time_pipeline
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_schedules", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--schedules", nargs=2, choices=NAMES, default=["zb-h1", "1f1b"])
    parser.add_argument("--num-micro-batches", type=count, default=4)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=8, help="in each round")
    parser.add_argument("--width", type=count, default=512, help="width of the dense layers")
    parser.add_argument("--layers", type=count, default=16, help="dense layers per stage")
    parser.add_argument("--micro-batch", type=count, default=384, help="samples")
    given = parser.parse_args(argv)
    chain = Chain(
        width=given.width, num_layers=2 * given.layers, global_batch_size=given.micro_batch
    )
    best: dict[str, Measured] = {}
    for _ in range(given.rounds):
        for name in given.schedules:
            found = time_pipeline(chain, given.num_micro_batches, name, "auto", given.steps)
            if name not in best or found.step < best[name].step:
                best[name] = found
    print(f"two stages of {given.layers} layers, {given.num_micro_batches} micro-batches")
    print()
    print(markdown_header(["ms per step", "measured", "processor of each mesh", "predicted"]))
    for name, it in best.items():
        processor = ", ".join(f"{1e3 * times.processor:.1f}" for times in it.meshes.values())
        print(markdown_row([name, f"{1e3 * it.step:.1f}", processor, f"{1e3 * it.predicted:.1f}"]))
    print()
    one, other = (best[name] for name in given.schedules)
    measured, predicted = one.step / other.step, one.predicted / other.predicted
    print(f"{' over '.join(given.schedules)}: measured {measured:.3f}, predicted {predicted:.3f}")
    print(f"measured over predicted {measured / predicted:.3f}")


if __name__ == "__main__":
    sys.exit(until_interrupted("bench_schedules", main))
