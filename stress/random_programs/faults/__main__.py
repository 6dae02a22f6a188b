"""Looks for planted faults with random programs, and prints how many it takes to find each.

    python -m stress.random_programs.faults --seed 0 --count 40

The exit status is 0 if all were found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import jax

from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row
from stress.random_programs.faults import FAULTS
from stress.random_programs.faults.search import Finding, search
from stress.random_programs.worker import DEVICES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 if all faults were found."""
    parser = argparse.ArgumentParser(
        prog="python -m stress.random_programs.faults",
        description="Looks for planted faults with random programs.",
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed; default: %(default)s")
    parser.add_argument("--count", type=count, default=40, help="seeds; default: %(default)s")
    parser.add_argument("--only", help="only faults with these words in their names; default: all")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if options.only is None or options.only in fault.name]
    if not chosen:
        names = ", ".join(fault.name for fault in FAULTS)
        parser.error(f"no fault has {options.only!r} in its name; there are: {names}")
    # Both must be set before JAX touches a device.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    start, missed = time.monotonic(), 0
    print(markdown_header(("fault", "in", "found after", "of which had it", "what differs")))
    for finding in search(chosen, range(options.seed, options.seed + options.count)):
        missed += finding.seed is None
        print(row(finding), flush=True)
    seconds = time.monotonic() - start
    print(f"\n{len(chosen) - missed} of {len(chosen)} found in {seconds:.0f} s")
    return int(missed > 0)


def row(finding: Finding) -> str:
    """A line of the table."""
    number = finding.programs if finding.seed is not None else f"not in {finding.programs}"
    fault = finding.fault
    cells = fault.name, fault.where, str(number), str(finding.planted), finding.difference
    return markdown_row(cells)


if __name__ == "__main__":
    sys.exit(until_interrupted("faults", main))
