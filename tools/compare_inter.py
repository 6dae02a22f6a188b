"""Compares the full search with restricted ones and manual plans (section 8.3, figure 9).

    python -m alpa.tools.compare_inter step.mlir --cluster v100-16gb:1x8 --num-micro-batches 128

The rows, with costs from the same model and within the device's memory:

* auto: the full search
* equal-layers, equal-ops: stages of equally many layers, layers of equally many contractions
* intra-only, inter-only: one stage on all devices; each stage on one device
* DxT: a manual plan. Each stage's mesh is D ways of data parallelism by T ways of tensor
  parallelism. There are as many stages as such meshes fit into the cluster, with equally many
  layers. With T > 1 `intra` is megatron, else data-parallel, and zero2.

No row should be much better than `auto`: small differences come from the solver's gap and from the
estimates of the stage search.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from alpa.dialects import ir, main_function
from alpa.dialects.plan import Schedule, read_meshes
from alpa.passes.base import NoRoomError
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.pipelines.clock import Clock
from alpa.passes.sharding.baselines import Intra
from alpa.passes.solve.stages.placement import submeshes
from alpa.runtime.planning import PlanningError, Settings, plan
from alpa.tools import zoo
from alpa.tools.arguments import count, share
from alpa.tools.guard import guard
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.programs import ZOO, lowered, placed, read

GRID = "grid"
_EXAMPLES = """\
examples:
  python -m alpa.tools.compare_inter step.mlir --cluster h100:1x8 --num-micro-batches 16
  python -m alpa.tools.compare_inter zoo:gpt-1.3b zoo:moe-1.3b --cluster v100-16gb:1x4 \\
      --num-micro-batches 128 --json figure9.json
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to plan, by its name in the table."""

    name: str
    settings: Settings


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a row. Without a plan, `problem` gives the reason, and the numbers are None."""

    name: str
    seconds: float | None = None
    """of a step, predicted"""
    objective: float | None = None
    """T of the stages, in seconds (`estimated_step_seconds` of `alpa.plan`)"""
    meshes: tuple[str, ...] = ()
    """the logical shape of each stage's mesh"""
    peak_bytes: int | None = None
    """the peak of the fullest device"""
    search_seconds: float
    """seconds of all passes"""
    problem: str | None = None
    out_of_memory: bool = False

    def cells(self, memory: int) -> list[str]:
        """The table's cells; `memory` is that of a device, in bytes."""
        search = seconds_text(self.search_seconds)
        if self.seconds is None or self.peak_bytes is None:
            reason = "out of memory" if self.out_of_memory else "not possible"
            return [self.name, reason, "", "", "", "", search]
        peak = f"{size_text(self.peak_bytes)} of {size_text(memory)}"
        shapes = " ".join(dict.fromkeys(self.meshes))
        step = f"{self.seconds:.4g} s"
        ratio = "" if self.objective is None else f"{self.objective / self.seconds:.3f}"
        return [self.name, step, ratio, str(len(self.meshes)), shapes, peak, search]


def rows(settings: Settings) -> list[Row]:
    """Returns all rows for a cluster, `auto` first; `settings` are those of `auto`.

    Raises:
        ClusterError: the cluster does not exist or is invalid.
    """
    restricted = [
        Row(name="auto", settings=settings),
        Row(name="equal-layers", settings=replace(settings, inter="equal-layers")),
        Row(name="equal-ops", settings=replace(settings, inter="equal-ops")),
        Row(name="intra-only", settings=replace(settings, inter="none")),
        Row(name="inter-only", settings=replace(settings, mesh_shape="1")),
    ]
    manual = [
        Row(
            name=f"{data}x{tensor} {intra}",
            settings=replace(
                settings, inter="equal-layers", intra=intra, mesh_shape=f"{data}x{tensor}"
            ),
        )
        for data, tensor in _grid(Cluster.parse(settings.cluster))
        for intra in _manual(data, tensor)
    ]
    return [*restricted, *manual]


def _grid(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Data by tensor parallelism: each factorisation of each submesh that tiles the cluster."""
    sizes = (n * m for n, m in submeshes(cluster.hosts, cluster.devices_per_host))
    for size in sizes:
        if cluster.num_devices % size == 0:
            yield from ((size // t, t) for t in range(1, size + 1) if size % t == 0)


def _manual(data: int, tensor: int) -> tuple[Intra, ...]:
    if tensor > 1:
        return ("megatron",)
    return ("data-parallel", "zero2") if data > 1 else ("data-parallel",)


def compare(module: ir.Module, chosen: Iterable[Row]) -> Iterator[Outcome]:
    """Yields the outcome of each row, one by one.

    The module has the size of a micro-batch and is not changed.
    """
    for row in chosen:
        clock = Clock()
        try:
            planned = plan(module, row.settings, clock)
        except PlanningError as error:
            reason = error.reason
            yield Outcome(
                name=row.name,
                search_seconds=sum(clock.seconds.values()),
                problem=str(error),
                out_of_memory=isinstance(reason, NoRoomError) and reason.missing is not None,
            )
            continue
        shapes = (mesh.logical_shape for mesh in read_meshes(main_function(planned.module)))
        yield Outcome(
            name=row.name,
            seconds=planned.plan.predicted_step_seconds,
            objective=planned.plan.estimated_step_seconds,
            meshes=tuple("x".join(map(str, shape)) or "1" for shape in shapes),
            peak_bytes=max(planned.plan.predicted_peak_bytes),
            search_seconds=sum(clock.seconds.values()),
        )


def complaint(outcomes: Sequence[Outcome], tolerance: float) -> str | None:
    """Describes by how much `auto` is worse than the best other row, if by more than that share.

    Returns None if `auto` is not among the rows, and a sentence if no row has a plan.
    """
    possible = [(o.seconds, o.name) for o in outcomes if o.seconds is not None]
    if not possible:
        return "none of the rows can be planned"
    auto = next((o for o in outcomes if o.name == "auto"), None)
    seconds, name = min(possible)
    if auto is None or name == "auto":
        return None
    if auto.seconds is None:
        return f"auto cannot be planned, but {name} takes {seconds:.4g} s"
    worse = auto.seconds / seconds - 1
    if worse <= tolerance:
        return None
    return (
        f"auto's step of {auto.seconds:.4g} s is {worse:.1%} longer than the {seconds:.4g} s of "
        f"{name}; {tolerance:.1%} is tolerated"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m alpa.tools.compare_inter",
        description="Compares the full search with restricted ones and with a grid of manual "
        "plans: predicted seconds per step and peak bytes per device. Prints Markdown. The exit "
        "status is 1 if a plan is better than the full search by more than --tolerance, or after "
        "an error.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("programs", nargs="+", metavar="FILE|zoo:NAME", help="StableHLO, or a zoo program")
    add("--cluster", required=True, metavar="C", help="preset:HOSTSxDEVICES, or a TOML file")
    add(
        "--num-micro-batches",
        type=count,
        required=True,
        metavar="N",
        help="forward and backward runs per update; a file has the size of one micro-batch",
    )
    add(
        "--micro-batch-size",
        type=count,
        metavar="N",
        help="samples in a micro-batch, for zoo programs; default: the batch of the model's paper "
        "divided by the number of micro-batches",
    )
    add(
        "--schedule",
        choices=["auto", *get_args(Schedule)],
        default="1f1b",
        help="order of the micro-batches; default: 1f1b, the paper's",
    )
    add(
        "--row",
        action="append",
        metavar="ROW",
        help="auto, equal-layers, equal-ops, intra-only, inter-only, or grid: all manual plans; "
        "may be repeated; default: all",
    )
    add(
        "--tolerance",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="share by which auto may be worse than the best; default: 0.02, the gap of the "
        "sharding solver",
    )
    add("--json", type=Path, metavar="FILE", help="where to write the numbers")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    results: list[dict[str, object]] = []
    complaints: list[str] = []
    try:
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise ValueError(f"cannot write {options.json}: there is no such folder")
        memory = Cluster.parse(options.cluster).device.memory
        chosen = _chosen(options)
        with until_the_reader_goes():
            for program in options.programs:
                found = _table(program, _module(program, options), chosen, memory)
                results.append({"program": program, "rows": [asdict(o) for o in found]})
                wrong = complaint(found, options.tolerance)
                complaints += [] if wrong is None else [f"{program}: {wrong}"]
        if options.json is not None:
            names = ("cluster", "num_micro_batches", "schedule")
            numbers = {name: getattr(options, name) for name in names} | {"programs": results}
            options.json.write_text(f"{json.dumps(numbers, indent=2)}\n", encoding="utf-8")
    except PlanningError as error:
        problems = [str(placed(one, options.programs[len(results)])) for one in error.diagnostics]
        print("\n".join(problems), file=sys.stderr)
        return 1
    except ClusterError as error:
        print(f"{error.place or 'compare_inter'}: error: {error.message}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"compare_inter: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: error: {error.strerror}", file=sys.stderr)
        return 1
    for line in complaints:
        print(f"error: {line}", file=sys.stderr)
    return 1 if complaints else 0


def _chosen(options: argparse.Namespace) -> list[Row]:
    """The requested rows. Raises ClusterError, ValueError."""
    everything = rows(
        Settings(
            cluster=options.cluster,
            num_micro_batches=options.num_micro_batches,
            schedule=options.schedule,
        )
    )
    if options.row is None:
        return everything
    grid = {row.name for row in everything if row.settings.intra != "auto"}
    known = [row.name for row in everything if row.name not in grid] + [GRID]
    for name in options.row:
        if name not in known:
            raise ValueError(f"there is no row {name}; there are {', '.join(known)}")
    return [r for r in everything if (GRID if r.name in grid else r.name) in options.row]


def _module(program: str, options: argparse.Namespace) -> ir.Module:
    """Returns the program at the size of a micro-batch. Raises PlanningError, ValueError."""
    if not program.startswith(ZOO):
        if options.micro_batch_size is not None:
            raise ValueError(
                f"--micro-batch-size is for zoo programs; {program} has the size of one micro-batch"
            )
        return read(program)
    found = zoo.get(program.removeprefix(ZOO))
    number, size = options.num_micro_batches, options.micro_batch_size
    if size is None:
        size, rest = divmod(found.global_batch_size, number)
        if rest:
            raise ValueError(
                f"the {found.global_batch_size} samples of {program} cannot be cut into {number} "
                "equal micro-batches; set their size with --micro-batch-size"
            )
    return lowered(found, size)


def _table(program: str, module: ir.Module, chosen: Sequence[Row], memory: int) -> list[Outcome]:
    """Prints the rows one by one, and below the table why some have no plan."""
    header = ["plan", "step", "T / step", "stages", "meshes", "peak memory", "search"]
    print(f"{program}\n\n{markdown_header(header)}", flush=True)
    found: list[Outcome] = []
    for outcome in compare(module, chosen):
        print(markdown_row(outcome.cells(memory)), flush=True)
        found.append(outcome)
    print()
    reasons = [f"* {o.name}: {o.problem}" for o in found if o.problem is not None]
    if reasons:
        print("\n".join(reasons), end="\n\n")
    return found


if __name__ == "__main__":
    guard("compare_inter")
    sys.exit(until_interrupted("compare_inter", main))
