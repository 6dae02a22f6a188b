"""Measures the pace of two workers that exchange tiles while strangers attack both.

    python -m stress.strangers --transport tcp --attack flood

The median way of a tile is compared with that without an attack, measured before and after
(`pace`). The strangers have the lowest priority. On a machine with few cores the ratio includes
some of their processor time all the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

import jax

from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row
from stress.strangers.attacks import ATTACKS
from stress.strangers.pace import Name, pace


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="strangers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--transport", choices=get_args(Name), action="append")
    parser.add_argument("--attack", choices=ATTACKS, action="append", help="by default all")
    parser.add_argument("--rounds", type=count, default=300)
    parser.add_argument("--tile", type=count, default=1 << 20, help="bytes")
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(markdown_header(["transport", "attack", "us per tile", "without", "ratio"]))
    for name in given.transport or get_args(Name):
        for attack in given.attack or ATTACKS:
            run = (name, given.tile, given.rounds)
            before, beside, after = (pace(*run, it) for it in (None, attack, None))
            alone = (before + after) / 2
            cells = [f"{1e6 * beside:.0f}", f"{1e6 * alone:.0f}", f"{beside / alone:.2f}"]
            print(markdown_row([name, attack, *cells]), flush=True)


if __name__ == "__main__":
    sys.exit(until_interrupted("strangers", main))
