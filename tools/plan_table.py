"""Prints a planned program as a table: `python -m alpa.tools.plan_table PLANNED.mlir`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from alpa.dialects import ir
from alpa.dialects.checks import CheckError
from alpa.passes import PassError
from alpa.passes.plan.table import plan_table
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within
from alpa.tools.interrupts import until_interrupted

_EXAMPLE = """\
example:
  alpa-opt step.mlir --pipeline='alpa{cluster=cpu:2x4 num-micro-batches=4}' -o planned.mlir
  python -m alpa.tools.plan_table planned.mlir
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.plan_table",
        description="Prints the stages, shardings and transfers of a plan, and what limits it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="PLANNED", help="a planned module, text or bytecode")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(plan_table(parse_within(options.file)))
    except (ir.MLIRError, CheckError, PassError, OSError) as error:
        return fail(error, options.file)
    return 0


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `python -m alpa.tools.plan_table`."""
    guard("plan_table")
    sys.exit(until_interrupted("plan_table", lambda: main(arguments)))


if __name__ == "__main__":
    command()
