"""`alpa`: checks the installation and prints what shells need to complete Alpa's commands.

    alpa doctor
    alpa completion bash

`alpa-plan`, `alpa-opt` and `alpa-calibrate` are commands of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from alpa.tools.arguments import add_version
from alpa.tools.interrupts import until_interrupted

_EXAMPLES = """\
examples:
  alpa doctor                    is everything there to plan and run?
  alpa doctor --json > doctor.json
  alpa --version
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    result = argparse.ArgumentParser(
        prog="alpa",
        description="Checks the installation of Alpa.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(result)
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="say whether Alpa can plan and run here, what is missing, and how to install it",
        description="Prints the versions of what Alpa needs, the devices that JAX sees, whether "
        "Ray runs or starts, whether stages can be compiled for GPUs that are not here, and the "
        "caches. The exit status is 0 if Alpa can plan and run here, else 1.",
        allow_abbrev=False,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for machines")
    doctor.add_argument("--no-ray", action="store_true", help="neither join nor start Ray")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        from alpa.tools.doctor import command as doctor  # noqa: PLC0415 - packages may be missing

        return doctor.run(json=options.json, with_ray=not options.no_ray)
    except ModuleNotFoundError as error:
        _say(f"{error.name} is not installed; run pip install {error.name}, then alpa doctor again")
        return 1


def _say(message: str) -> None:
    print(f"alpa: error: {message}", file=sys.stderr, flush=True)


def command() -> NoReturn:
    """The command `alpa`."""
    sys.exit(until_interrupted("alpa", main))


if __name__ == "__main__":
    command()
