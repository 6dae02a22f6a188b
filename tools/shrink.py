"""Makes a smaller program of the same structure: `python -m alpa.tools.shrink FILE --dim 2560=64`.

Before: `stablehlo.slice %x [0:16, 64:128] : (tensor<16x128xf32>) -> tensor<16x64xf32>`
After `--dim 128=16 --dim 64=8`: `stablehlo.slice %x [0:16, 8:16] : (tensor<16x16xf32>) -> ...`

`--dim N=M` replaces N by M wherever N is a size: in tensor types, in the attributes that count
elements (limits of slices, windows, groups of a convolution), and in constants whose elements all
equal N, such as the divisor of a mean or the size that is added to a negative index. Other
constants are cropped. Sizes that depend on one another (128 heads of 64, a reshape to 8192) each
need a `--dim`. The result is a valid program, but not the same function. It runs in seconds.

Limits: a size is identified by its number, so two dimensions of one size shrink together, and a
constant that happens to equal N changes. Loop bounds keep their value without `--trip-counts`.

`--elided-as-arguments` turns constants without values (`dense_resource<__elided__>`) into arguments
of @main with `alpa.role = "constant"`, after the others, in the order of the constants.

Fails when: a size does not occur, or the smaller program does not verify; the error names the op.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alpa.dialects import ir
from alpa.passes import PassError
from alpa.runtime.shrink import elided_to_arguments, shrink
from alpa.tools.arguments import check_sizes, parse_size
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within
from alpa.tools.interrupts import until_interrupted

_EXAMPLE = """\
example:
  python -m alpa.tools.shrink step.mlir --dim 2560=64 --dim 8192=128 -o small.mlir
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.shrink",
        description="Makes a smaller program of the same structure.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a program, text or bytecode")
    parser.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        type=parse_size,
        metavar="N=M",
        help="replace every size N by M; may be repeated",
    )
    parser.add_argument(
        "--trip-counts", action="store_true", help="also change loop bounds that equal an N"
    )
    parser.add_argument(
        "--elided-as-arguments",
        action="store_true",
        help="turn constants without values into arguments of @main",
    )
    parser.add_argument("-o", dest="output", type=Path, metavar="OUT", help="default: print it")
    options = parser.parse_args(arguments)
    try:
        check_sizes("--dim", options.dims)
    except ValueError as error:
        parser.error(str(error))
    try:
        module = parse_within(options.file)
        if options.elided_as_arguments:
            elided_to_arguments(module)
        shrink(module, dict(options.dims), trip_counts=options.trip_counts)
        module.operation.verify()
        text = f"{module.operation.get_asm()}".rstrip("\n") + "\n"
        if options.output is None:
            print(text, end="")
        else:
            options.output.write_text(text)
    except (ir.MLIRError, PassError, OSError, ValueError) as error:
        return fail(error, options.file)
    return 0


if __name__ == "__main__":
    guard("shrink")
    sys.exit(until_interrupted("shrink", main))
