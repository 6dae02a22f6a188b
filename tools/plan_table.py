"""Prints a planned program for people: `python -m alpa.tools.plan_table PLANNED.mlir`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from alpa.dialects import format_error, ir
from alpa.dialects.checks import CheckError
from alpa.passes import PassError
from alpa.passes.analysis.plan_table import plan_table
from alpa.passes.pipelines.diagnostics import place_of
from alpa.tools.guard import guard, parse_within

_EXAMPLE = """\
example:
  alpa-opt step.mlir --pipeline='alpa{cluster=cpu:2x4 num-micro-batches=4}' -o planned.mlir
  python -m alpa.tools.plan_table planned.mlir
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.plan_table",
        description="Prints what a planned program does where, and what limits it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="PLANNED", help="a planned module, text or bytecode")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(plan_table(parse_within(options.file)))
    except OSError as error:
        print(f"{options.file}: error: {error.strerror}", file=sys.stderr)
    except ir.MLIRError as error:
        print(format_error(error), file=sys.stderr)
    except (CheckError, PassError) as error:
        print(f"{place_of(error.location)}: error: {error.message}", file=sys.stderr)
    else:
        return 0
    return 1


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `python -m alpa.tools.plan_table`."""
    guard("plan_table")
    sys.exit(main(arguments))


if __name__ == "__main__":
    command()
