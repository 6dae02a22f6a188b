"""A planned program as a table for people.

The numbers are those of `report.py`, all read from the IR. So the table says what is planned, not
what was meant.

Seconds of a stage are the plan's roofline compute of one micro-batch; the predicted step adds
communication and the update. Peak bytes are the plan's prediction, state bytes follow from the
shardings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from alpa.dialects import ir
from alpa.dialects.attributes import INDEPENDENT
from alpa.dialects.mpmd_types import Origin
from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.pipelines.diagnostics import printable
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.data import Program
from alpa.passes.plan.limits import limits
from alpa.passes.plan.reader import origin_name, read_planned
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.row_names import pipeline_text, row_name
from alpa.passes.plan.text import aligned, count_text, percent, ranges_text
from alpa.passes.plan.transfer_report import TransferReport
from alpa.passes.solve.sharding.problem import OPTIMAL

_PATTERNS = 4  # that a row lists before it sums up the rest
_UNPROVEN = {None: "not checked", INDEPENDENT: "independent (as asked)"}


def plan_table(module: ir.Module, report: PlanReport | None = None) -> str:
    """The plan of a module that `stage-mesh-partition`, at least, has run on.

    Args:
        module: the planned module.
        report: what `PlanReport.of` says of it, where that is known.

    Raises:
        CheckError, PassError: the module is not a planned one.
    """
    report = report or PlanReport.of(module)
    program = read_planned(module)
    sections = (
        headlines(report),
        _stages(report),
        limits(report),
        _collectives(report),
        _transfers(report),
        _strategy(program, report),
        _roles(program),
    )
    texts = ("\n".join(lines) for lines in sections)
    return printable("\n\n".join(text for text in texts if text) + "\n")


def _loss(report: PlanReport) -> str:
    """By how much the schedule that comes second is slower."""
    second = report.runner_up_seconds
    if not report.runner_up_is_estimated:
        more = percent(second / report.predicted_step_seconds - 1)
        return f"its plan takes {seconds_text(second)}, {more} longer"
    # Its plan was not finished: estimates are compared with estimates.
    best = report.estimated_step_seconds
    return (
        f"its stages are estimated at {seconds_text(second)}, those of {report.schedule} at "
        f"{seconds_text(best)}"
    )


def headlines(report: PlanReport) -> Iterator[str]:
    """What was planned for which machine, and what is proven about it."""
    machine, idle = report.cluster or "a cluster of no name", set[int]()
    cluster = cluster_here(report.cluster)
    if cluster is not None:
        kinds = (
            f"{count_text(kind.hosts, 'host')} x {kind.devices_per_host} {kind.device.name}"
            for kind in cluster.kinds
        )
        machine += f" ({', '.join(kinds)})"
        idle = {*range(cluster.hosts)} - {host for mesh in report.meshes for host in mesh.hosts}
    batches, said = report.num_micro_batches, report.micro_batches
    yield (
        f"plan for {machine}: {pipeline_text(report)}, "
        f"{count_text(batches, 'micro-batch', 'micro-batches')}, "
        f"{report.schedule}, predicted step {seconds_text(report.predicted_step_seconds)}"
    )
    if report.runner_up:
        yield f"schedules: {report.runner_up} comes second; {_loss(report)}"
    if idle:
        yield f"left idle: {count_text(len(idle), 'host')} ({ranges_text(sorted(idle))})"
    if batches > 1:
        yield f"micro-batches: {_UNPROVEN.get(said) or f'{said} (proven)'}"
    seconds, bound = report.estimated_step_seconds, report.estimated_step_bound
    if bound not in (0, seconds):
        yield (
            f"cut into stages: estimated at {seconds_text(seconds)}; no cut of these layers "
            f"is estimated below {seconds_text(bound)}"
        )
    solver = report.solver
    if solver is not None:
        proven = "proven optimal"
        if solver.gap > OPTIMAL:
            ended = "the time limit came first; " if solver.status == "time_limit" else ""
            proven = f"{ended}at most {solver.gap:.2%} above the optimum"
        folded = any(mesh.problem == "folded" for mesh in solver.meshes)
        among = ", among those that shard equal layers alike" if folded else ""
        yield f"shardings of these stages: {proven}{among}"
    for one in report.dropped:
        yield f"left out of the search: {one.what}: {one.reason}"


def stage_rows(report: PlanReport) -> list[list[str]]:
    """The table of stages: first the names of its columns, then a row for each stage."""
    cluster = cluster_here(report.cluster)
    columns = ["stage", "mesh", "hosts", "devices", "shape", "layers", "forward", "backward"]
    columns += ["update", "state", "peak"] + (["memory"] if cluster is not None else [])
    rows = [columns]
    for number, (mesh, stage) in enumerate(zip(report.meshes, report.stages, strict=True)):
        row = [
            ranges_text(sorted(stage.numbers or (number,))),
            mesh.name,
            ranges_text(mesh.hosts),
            ranges_text(mesh.devices),
            "x".join(map(str, mesh.logical_shape)),
            layers_text(stage.layers),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
            seconds_text(stage.update_seconds),
            size_text(stage.state_bytes),
            "-" if stage.peak_bytes is None else size_text(stage.peak_bytes),
        ]
        if cluster is not None:
            mine = cluster.of(mesh.hosts).device.memory
            row.append("-" if stage.peak_bytes is None else percent(stage.peak_bytes / mine))
        rows.append(row)
    return rows


def stage_units(report: PlanReport) -> str:
    """What the numbers of the stages are."""
    cluster, share = cluster_here(report.cluster), ""
    if cluster is not None:
        sizes = [size_text(kind.device.memory) for kind in cluster.kinds]
        of = sizes[0] if len(sizes) == 1 else "the device's memory"
        share = f"; peak as a share of {of}"
    return f"seconds per micro-batch, of the update per step; bytes per device{share}"


def _stages(report: PlanReport) -> Iterator[str]:
    yield from aligned(stage_rows(report))
    yield f"({stage_units(report)})"
    alike: dict[tuple[str, str], list[int]] = {}
    for number, stage in enumerate(report.stages):
        if stage.splits:
            alike.setdefault((stage.splits, stage.held), []).append(number)
    for (splits, held), numbers in alike.items():
        name = row_name(report, numbers)
        yield f"{name}: {splits}"
        if held:
            yield f"{' ' * len(name)}  {held}"
    for number, stage in enumerate(report.stages):
        if stage.remat:
            yield f"{row_name(report, [number])}: remat: layers {layers_text(stage.remat)}"


def _strategy(program: Program, report: PlanReport) -> Iterator[str]:
    """What is split over which axes; stages with equal lines are one block."""
    blocks: dict[tuple[str, ...], list[int]] = {}
    for number, mesh in enumerate(program.meshes):
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
        block = (axes, *_stage_strategy(program, mesh.name))
        blocks.setdefault(block, []).append(number)
    yield "strategy"
    for (axes, *rows), numbers in blocks.items():
        yield f"  {row_name(report, numbers)} ({axes})"
        yield from rows


def _stage_strategy(program: Program, mesh: str) -> Iterator[str]:
    """Batch, parameters, optimizer and activations of a stage."""
    dims = {a.value: a.attributes.batch_dim for a in program.arguments}
    groups = {
        "batch": [a.value for a in program.arguments if a.attributes.role == "batch"],
        "parameters": program.parameters,
        "state that only the update reads": program.states - program.parameters,
        "activations that the backward part reads": program.activations,
    }
    for title, values in groups.items():
        patterns: dict[str, list[int]] = {}
        for v in values:
            if program.values[v].mesh == mesh:
                pattern = _pattern(program, v, dims.get(v))
                patterns.setdefault(pattern, []).append(program.values[v].bytes)
        if patterns:
            yield from _by_pattern(title, patterns)


def _pattern(program: Program, value: int, batch_dim: int | None) -> str:
    """A value's sharding in words: `dim 0 on axis0, dim 1 on axis1`."""
    it = program.values[value]
    if it.sharding is None:
        return "not sharded yet"
    words: list[str] = []
    for number, axes in enumerate(it.dims):
        split = [axis for axis in axes if program.axis_size(value, axis) > 1]
        if split:
            name = "batch" if number == batch_dim else f"dim {number}"
            words.append(f"{name} on {'+'.join(split)}")
    return ", ".join(words) or "replicated"


def _by_pattern(title: str, sizes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """`parameters: 30 tensors`, then `replicated: 12 of 30`, and so on; most bytes first."""
    count, total = sum(map(len, sizes.values())), sum(map(sum, sizes.values()))
    yield f"    {title}: {count_text(count, 'tensor')}, {size_text(total)}"
    order = sorted(sizes, key=lambda it: (-sum(sizes[it]), -len(sizes[it]), it))
    for pattern in order[:_PATTERNS]:
        here = sum(sizes[pattern])
        share = f" = {percent(here / total)}" if total and len(order) > 1 else ""
        yield f"      {pattern}: {len(sizes[pattern])} of {count}, {size_text(here)}{share}"
    others = order[_PATTERNS:]
    rest = [size for pattern in others for size in sizes[pattern]]
    if rest:
        yield (
            f"      {count_text(len(others), 'other layout')}: {len(rest)} of {count}, "
            f"{size_text(sum(rest))}"
        )


def _collectives(report: PlanReport) -> Iterator[str]:
    """What the devices of a stage send to each other in a step, in how many collectives."""
    rows = [["inside", "sent", "collectives", "combined", "priced as", "of these"]]
    for number, stage in enumerate(report.stages):
        if stage.sent_bytes is None:
            return
        kinds: Counter[str] = Counter()
        for it in report.collectives:
            kinds[it.kind] += it.count if it.mesh == stage.mesh else 0
        rows.append(
            [
                row_name(report, [number]),
                size_text(stage.sent_bytes),
                str(stage.num_collectives),
                str(stage.num_combined),
                str(stage.priced_starts),
                ", ".join(f"{kind} {n}" for kind, n in kinds.most_common() if n) or "-",
            ]
        )
    yield from aligned(rows, left=(0, 5))
    yield "(per step and device; combined: what the compiler makes of them)"


def _transfers(report: PlanReport) -> list[str]:
    """What crosses between stages: per micro-batch, or once per step."""
    stage_of = {mesh.name: number for number, mesh in enumerate(report.meshes)}
    groups: dict[tuple[str, int, int], list[TransferReport]] = {}
    for transfer in report.transfers:
        key = (transfer.per, stage_of[transfer.source], stage_of[transfer.target])
        groups.setdefault(key, []).append(transfer)
    rows = [["crosses", "per", "values", "bytes", "between hosts", "inside hosts", "methods"]]
    for (per, source, target), transfers in sorted(groups.items()):
        methods = Counter(transfer.method for transfer in transfers if transfer.method)
        rows.append(
            [
                f"{source} -> {target}",
                per,
                str(len(transfers)),
                size_text(sum(transfer.bytes for transfer in transfers)),
                _total([transfer.slow_bytes for transfer in transfers]),
                _total([transfer.fast_bytes for transfer in transfers]),
                ", ".join(f"{m} {n}" for m, n in methods.most_common()) or "not decided yet",
            ]
        )
    return aligned(rows, left=(0, 1, 6)) if groups else []


def _total(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return size_text(sum(known)) if len(known) == len(sizes) else "-"


def _roles(program: Program) -> Iterator[str]:
    """How many arguments and results play which role."""
    used, unused = "state, parameters", "state, read by the update only"
    arguments: dict[str, set[int]] = {}
    for argument in program.arguments:
        role = argument.attributes.role or "without a role"
        if role == "state":
            role = used if argument.value in program.parameters else unused
        arguments.setdefault(role, set()).add(argument.number)
    # A state that only the update reads on one mesh is a parameter all the same on another.
    if unused in arguments:
        arguments[unused] -= arguments.get(used, set())
    results: dict[str, set[int]] = {}
    for result in program.results:
        kind = result.attributes.role
        word = "without a role" if kind is None else "new state" if kind.kind == "state" else kind
        results.setdefault(str(word), set()).add(result.number)
    yield "roles"
    for noun, groups in (("argument", arguments), ("result", results)):
        for role, numbers in groups.items():
            if numbers:
                yield f"  {role}: {count_text(len(numbers), noun)} ({ranges_text(sorted(numbers))})"


def layers_text(names: Sequence[str]) -> str:
    """`layer_2`, `layer_3` as `2-3`; other names as they are."""
    numbers = [name.removeprefix("layer_") for name in names]
    if numbers and all(number.isdigit() for number in numbers):
        return ranges_text(sorted(int(number) for number in numbers))
    return origin_name(tuple(Origin(name) for name in names)) if names else "-"
