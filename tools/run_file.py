"""Plans a program, runs the plan on virtual CPU devices, and compares it with XLA on one device.

    python -m alpa.tools.run_file step.mlir --cluster cpu:2x4 --num-layers 4 --num-stages 2

Arguments are random, from a seed, and keep the program finite: variances are positive, indices and
labels in range. Arrays that only the update reads start at zero, as moments do. Integers that only
the update reads start at one, where a learning rate with warm-up is not zero. Constants without
values become arguments. `--dim N=M` shrinks the program first, as `alpa.tools.shrink` does.
`--roles` gives the roles of arguments and results, as for `alpa-plan`. All micro-batches are equal.

`alpa.runtime.comparison` defines equality and separates faults from noise. The exit status is 0 if
every result is equal or differs only by noise, for which a warning is printed, and 1 otherwise.
`--widen` computes everything in 64 bits, where the noise is smaller.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from alpa.dialects import ir, separate
from alpa.passes import PassError
from alpa.passes.analysis.roles_file import RolesError, RolesFile
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.compare_programs import compare_programs
from alpa.runtime.comparison import SHOWN
from alpa.runtime.planning import PlanningError, run_pass
from alpa.runtime.shrink import elided_to_arguments, shrink
from alpa.runtime.widen import widened
from alpa.tools.arguments import count, parse_size
from alpa.tools.devices import make_devices
from alpa.tools.errors import fail
from alpa.tools.guard import guard, parse_within
from alpa.tools.interrupts import until_interrupted

_EXAMPLES = """\
examples:
  python -m alpa.tools.run_file step.mlir --cluster cpu:2x4 --num-layers 4 --num-stages 2
  python -m alpa.tools.run_file llm.mlir --dim 2560=64 --dim 8192=128
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.run_file",
        description="Plans a program, runs it on virtual CPU devices, and compares the results "
        "with one device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a program, text or bytecode")
    parser.add_argument("--cluster", default="cpu:2x4", help="default: %(default)s")
    for name in ("num-layers", "num-stages", "num-micro-batches"):
        parser.add_argument(f"--{name}", metavar="N", help=f"the option {name} of the passes")
    parser.add_argument("--roles", metavar="ROLES.toml", help="roles of arguments and results")
    parser.add_argument("--seed", type=int, default=0, help="seed of the arguments; default: 0")
    parser.add_argument(
        "--dim",
        dest="dims",
        action="append",
        default=[],
        type=parse_size,
        metavar="N=M",
        help="replace every size N by M before planning; may be repeated",
    )
    parser.add_argument("--widen", action="store_true", help="make all real floats 64 bits wide")
    parser.add_argument(
        "--show", type=count, default=SHOWN, metavar="N", help="results to list; default: 10"
    )
    parser.add_argument("-o", dest="output", type=Path, metavar="OUT", help="also write the plan")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 unless a result differs by more than noise."""
    options = _parser().parse_args(arguments)
    names = ("cluster", "num_layers", "num_stages", "num_micro_batches")
    pass_options = {
        name.replace("_", "-"): value
        for name in names
        if (value := getattr(options, name)) is not None
    }
    try:
        devices = Cluster.parse(options.cluster).num_devices
        roles = None if options.roles is None else RolesFile.read(options.roles)
        make_devices(devices)
        clock = Clock()
        source = parse_within(options.file)
        # Roles count the elements of tuples, and tuples would keep the types of their parts.
        run_pass("import-hlo", {}, source, clock)
        if roles is not None:
            roles.apply(source)
        elided_to_arguments(source)
        if options.dims:
            shrink(source, dict(options.dims))
        source.operation.verify()
        if options.widen:
            source = widened(source)
        planned = separate(source.operation)
        run_pass("alpa", pass_options, planned, clock)
        if options.output is not None:
            options.output.write_text(f"{planned.operation.get_asm()}\n")
        comparison = compare_programs(source, planned, seed=options.seed, clock=clock)
    except (PlanningError, RolesError) as error:
        print(error, file=sys.stderr)
        return 1
    except (ir.MLIRError, PassError, OSError, ValueError, ClusterError) as error:
        return fail(error, options.file)
    print(*(f"{name} {value:.2f} s" for name, value in clock.seconds.items()), sep=", ")
    print(comparison.table(options.show))
    print(comparison.summary())
    return 1 if comparison.is_fault else 0


if __name__ == "__main__":
    guard("run_file")
    sys.exit(until_interrupted("run_file", main))
