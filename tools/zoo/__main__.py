"""Writes the StableHLO text of a zoo program: `python -m alpa.tools.zoo gpt-tiny`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from alpa.tools import zoo
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import until_the_reader_goes


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.zoo",
        description="Lowers the training step of a zoo program, by shapes alone, to StableHLO.",
        epilog="example: python -m alpa.tools.zoo gpt-2.6b --micro-batch-size 8 -o gpt.mlir",
    )
    parser.add_argument("name", nargs="?", help="the program, see --list")
    parser.add_argument("--list", action="store_true", help="print all programs and their sizes")
    parser.add_argument("--micro-batch-size", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--optimizer", choices=zoo.OPTIMIZERS, default="adam", help="default adam")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: standard output"
    )
    options = parser.parse_args(arguments)

    if options.list:
        with until_the_reader_goes():
            _list()
        return 0
    if options.name is None:
        parser.error("name a program; --list lists them")
    try:
        program = zoo.get(options.name, optimizer=options.optimizer)
        text = program.lower(options.micro_batch_size)
    except ValueError as error:
        parser.error(str(error))
    if options.output is None:
        with until_the_reader_goes():
            sys.stdout.write(text)
    else:
        options.output.write_text(text)
    return 0


def _list() -> None:
    """Prints a line for each program, one at a time."""
    print(f"{'name':<18}{'parameters':>16}{'global batch':>14}")
    for name in zoo.names():
        program = zoo.get(name)
        print(
            f"{name:<18}{program.num_parameters():>16,}{program.global_batch_size:>14}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(until_interrupted("zoo", main))
