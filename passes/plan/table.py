"""A planned program as a table for people.

The numbers are those of `report.py`, all read from the IR. So the table says what is planned, not
what was meant.

Seconds of a stage are the plan's roofline compute of one micro-batch; the predicted step adds
communication and the update. Peak bytes are the plan's prediction, state bytes follow from the
shardings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects import ir
from alpa.dialects.attributes import EXACT, INDEPENDENT
from alpa.dialects.mpmd_types import Origin
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import size_text
from alpa.passes.plan.data import Program
from alpa.passes.plan.reader import origin_name, read_planned
from alpa.passes.plan.report import PlanReport, StageReport, TransferReport
from alpa.passes.plan.text import aligned, count_text, percent, ranges_text, seconds_text

_PATTERNS = 4  # that a row lists before it sums up the rest
_ONE_MICRO_BATCH = "one micro-batch: pipelining cannot gain anything"


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
    view = _View(report=report, program=program)
    parts = (_header, _stages, _limits, _transfers, _strategy, _roles)
    sections = ["\n".join(part(view)) for part in parts]
    return "\n\n".join(section for section in sections if section) + "\n"


@dataclass(frozen=True, kw_only=True)
class _View:
    """A plan's numbers, and the program that they are of."""

    report: PlanReport
    program: Program

    def pattern(self, value: int, batch_dim: int | None = None) -> str:
        """A value's sharding in words: `dim 0 on axis0, dim 1 on axis1`."""
        it = self.program.values[value]
        if it.sharding is None:
            return "not sharded yet"
        words: list[str] = []
        for number, axes in enumerate(it.dims):
            split = [axis for axis in axes if self.program.axis_size(value, axis) > 1]
            if split:
                name = "batch" if number == batch_dim else f"dim {number}"
                words.append(f"{name} on {'+'.join(split)}")
        return ", ".join(words) or "replicated"


def _header(view: _View) -> list[str]:
    report = view.report
    machine = report.cluster or "a cluster of no name"
    try:
        cluster = Cluster.parse(report.cluster)
    except ClusterError:
        pass  # A file that is not here.
    else:
        machine += f" ({count_text(cluster.hosts, 'host')} x {cluster.devices_per_host} "
        machine += f"{cluster.device.name})"
    return [
        f"plan for {machine}: {count_text(len(report.stages), 'stage')}, "
        f"{count_text(report.num_micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{report.schedule}, predicted step {seconds_text(report.predicted_step_seconds)}",
        *_micro_batches(report),
        *_cut(report),
        *_shardings(report),
        *_dropped(report),
    ]


_PROVEN = {EXACT: "exact (proven)", INDEPENDENT: "independent (as asked)"}


def _micro_batches(report: PlanReport) -> list[str]:
    """What is known of several micro-batches."""
    if report.num_micro_batches == 1:
        return []
    said = report.micro_batches
    return [f"micro-batches: {'not checked' if said is None else _PROVEN.get(said, said)}"]


def _cut(report: PlanReport) -> list[str]:
    """What is proven about the cut into stages."""
    seconds, bound = report.estimated_step_seconds, report.estimated_step_bound
    if not bound or bound == seconds:
        return []
    return [
        f"cut into stages: estimated at {seconds_text(seconds)}; no cut of these layers "
        f"is estimated below {seconds_text(bound)}"
    ]


def _shardings(report: PlanReport) -> list[str]:
    """What is proven about the shardings inside the meshes."""
    solver = report.solver
    if solver is None:
        return []
    if solver.status == "optimal":
        proven = "proven optimal"
    else:
        ended = "the time limit came first; " if solver.status == "time_limit" else ""
        proven = f"{ended}at most {solver.gap:.2%} above the optimum"
    folded = any(mesh.problem == "folded" for mesh in solver.meshes)
    among = ", among those that shard equal layers alike" if folded else ""
    return [f"shardings of these stages: {proven}{among}"]


def _dropped(report: PlanReport) -> list[str]:
    """What the search left out though it may have been possible."""
    return [f"left out of the search: {one.what}: {one.reason}" for one in report.dropped]


def _stages(view: _View) -> list[str]:
    report, memory = view.report, view.report.memory_bytes
    columns = ["stage", "mesh", "hosts", "devices", "shape", "layers", "forward", "backward"]
    columns += ["update", "state", "peak"] + (["memory"] if memory else [])
    rows = [columns]
    for number, (mesh, stage) in enumerate(zip(report.meshes, report.stages, strict=True)):
        row = [
            str(number),
            mesh.name,
            ranges_text(mesh.hosts),
            ranges_text(mesh.devices),
            "x".join(map(str, mesh.logical_shape)),
            _layers(stage.layers),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
            seconds_text(stage.update_seconds),
            size_text(stage.state_bytes),
            "-" if stage.peak_bytes is None else size_text(stage.peak_bytes),
        ]
        if memory:
            row.append("-" if stage.peak_bytes is None else percent(stage.peak_bytes / memory))
        rows.append(row)
    notes = "seconds per micro-batch, of the update per step; bytes per device"
    if memory:
        notes += f"; peak as a share of {size_text(memory)}"
    return [*aligned(rows), f"({notes})", *_in_words(report), *_rematerialised(report)]


def _in_words(report: PlanReport) -> list[str]:
    """The strategy of each stage, equal ones together."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, stage in enumerate(report.stages):
        if stage.splits:
            found.setdefault((stage.splits, stage.held), []).append(number)
    lines: list[str] = []
    for (splits, held), numbers in found.items():
        name = _stage_name(numbers)
        lines.append(f"{name}: {splits}")
        lines += [f"{' ' * len(name)}  {held}"] if held else []
    return lines


def _rematerialised(report: PlanReport) -> list[str]:
    """The layers of each stage that are computed twice."""
    return [
        f"{_stage_name([number])}: remat: layers {_layers(stage.remat)}"
        for number, stage in enumerate(report.stages)
        if stage.remat
    ]


def _stage_name(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {ranges_text(numbers)}"


def _strategy(view: _View) -> list[str]:
    """What is split over which axes; stages of which the same can be said stand together."""
    blocks: dict[tuple[str, ...], list[int]] = {}
    for number, mesh in enumerate(view.program.meshes):
        axes = ", ".join(f"{name}={size}" for name, size in mesh.axes)
        block = (axes, *_stage_strategy(view, mesh.name))
        blocks.setdefault(block, []).append(number)
    lines = ["strategy"]
    for (axes, *rows), numbers in blocks.items():
        lines += [f"  {_stage_name(numbers)} ({axes})", *rows]
    return lines


def _stage_strategy(view: _View, mesh: str) -> list[str]:
    """Batch, parameters, optimizer and activations of a stage."""
    program = view.program
    dims = {a.value: a.attributes.batch_dim for a in program.arguments}
    roles = {a.value: a.attributes.role for a in program.arguments}
    groups = {
        "batch": [v for v, role in roles.items() if role == "batch"],
        "parameters": sorted(program.parameters),
        "state that only the update reads": sorted(program.states - program.parameters),
        "activations that the backward part reads": sorted(program.activations),
    }
    lines: list[str] = []
    for title, values in groups.items():
        here = [v for v in values if program.values[v].mesh == mesh]
        if here:
            patterns = [(view.pattern(v, dims.get(v)), program.values[v].bytes) for v in here]
            lines += _by_pattern(title, patterns)
    return lines


def _by_pattern(title: str, patterns: Sequence[tuple[str, int]]) -> list[str]:
    """`parameters: 30 tensors`, then `replicated: 12 of 30`, and so on; most bytes first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for pattern, size in patterns:
        counts[pattern] += 1
        sizes[pattern] += size
    order = sorted(counts, key=lambda pattern: (-sizes[pattern], -counts[pattern], pattern))
    total = sum(sizes.values())
    lines = [f"    {title}: {count_text(len(patterns), 'tensor')}, {size_text(total)}"]
    for pattern in order[:_PATTERNS]:
        share = f" = {percent(sizes[pattern] / total)}" if total and len(order) > 1 else ""
        lines.append(
            f"      {pattern}: {counts[pattern]} of {len(patterns)}, "
            f"{size_text(sizes[pattern])}{share}"
        )
    rest = order[_PATTERNS:]
    if rest:
        lines.append(
            f"      {count_text(len(rest), 'other layout')}: {sum(counts[p] for p in rest)} of "
            f"{len(patterns)}, {size_text(sum(sizes[p] for p in rest))}"
        )
    return lines


def _transfers(view: _View) -> list[str]:
    """What crosses between stages: per micro-batch, or once per step."""
    stage_of = {mesh.name: number for number, mesh in enumerate(view.report.meshes)}
    groups: dict[tuple[str, int, int], list[TransferReport]] = {}
    for transfer in view.report.transfers:
        key = (transfer.per, stage_of[transfer.source], stage_of[transfer.target])
        groups.setdefault(key, []).append(transfer)
    if not groups:
        return []
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
    return aligned(rows, left=(0, 1, 6))


def _total(sizes: Sequence[int | None]) -> str:
    known = [size for size in sizes if size is not None]
    return size_text(sum(known)) if len(known) == len(sizes) else "-"


def _limits(view: _View) -> list[str]:
    report, stages = view.report, view.report.stages
    batches, count = report.num_micro_batches, len(stages)
    lines = ["what limits it"]
    total = sum(stage.seconds for stage in stages)
    slowest = max(stages, key=lambda stage: stage.seconds)
    if count > 1 and total:
        lines.append(f"  {_balance(stages, slowest, total)}")
    lines.append(f"  {_bubble(count, batches)}")
    if report.predicted_step_seconds and total:
        word = "forward and backward" if count == 1 else "slowest stage"
        parts = [
            (batches * slowest.seconds, f"{word} ({batches} x {seconds_text(slowest.seconds)})"),
            (total - slowest.seconds, "fill and drain"),
        ]
        lines.append(f"  {_step_seconds(report.predicted_step_seconds, parts)}")
    lines += [f"  {line}" for line in _inside_meshes(report)]
    memory = report.memory_bytes
    if memory and any(stage.peak_bytes for stage in stages):
        fullest = max(stages, key=lambda stage: stage.peak_bytes or 0)
        free = memory - (fullest.peak_bytes or 0)
        lines.append(
            f"  memory: stage {stages.index(fullest)} is the fullest; {size_text(free)} of "
            f"{size_text(memory)} per device stay free ({percent(free / memory)})"
        )
    lines += [
        f"  stage {number} holds {size_text(stage.state_bytes)} of state per device, more "
        "than its predicted peak, which assumes an even split"
        for number, stage in enumerate(stages)
        if stage.peak_bytes is not None and stage.state_bytes > stage.peak_bytes
    ]
    return lines


def _inside_meshes(report: PlanReport) -> list[str]:
    """Of the mesh that is busy for longest, what its compute does not explain."""
    if report.solver is None:
        return []
    busiest = max(report.solver.meshes, key=lambda solved: solved.objective)
    stage = next(stage for stage in report.stages if stage.mesh == busiest.mesh)
    if stage.compute_seconds is None:
        return []
    rest = busiest.objective - stage.compute_seconds
    if rest < 0.005 * busiest.objective:
        return []
    return [
        f"inside {busiest.mesh}: {percent(rest / busiest.objective)} of "
        f"{seconds_text(busiest.objective)} per step are collectives and work that devices repeat"
    ]


def _bubble(stages: int, batches: int) -> str:
    if stages == 1:
        text = "one stage: no pipeline, so no bubble"
        return f"{text}; {_ONE_MICRO_BATCH}" if batches == 1 else text
    bubble = (stages - 1) / (stages - 1 + batches)
    text = f"pipeline bubble: (S-1)/(S-1+B) = {percent(bubble)} with S={stages} stages"
    if batches == 1:
        return f"{text}; {_ONE_MICRO_BATCH}"
    more = (stages - 1) / (stages - 1 + 4 * batches)
    return f"{text} and B={batches} micro-batches; {4 * batches} would make it {percent(more)}"


def _balance(stages: Sequence[StageReport], slowest: StageReport, total: float) -> str:
    share, count, longest = slowest.seconds / total, len(stages), seconds_text(slowest.seconds)
    if share * count < 1.005:
        return f"the stages are balanced: each takes {longest} per micro-batch"
    return (
        f"stage {stages.index(slowest)} is the slowest: {longest} of {seconds_text(total)} "
        f"per micro-batch, {percent(share)} where {percent(1 / count)} would be even"
    )


def _step_seconds(step: float, parts: Sequence[tuple[float, str]]) -> str:
    """The predicted step by what it is spent on; the rest is spent between and after the stages."""
    rest = step - sum(seconds for seconds, _ in parts)
    shares = [
        f"{percent(seconds / step)} {text}"
        for seconds, text in [*parts, (rest, "transfers and update")]
        if seconds > 1e-4 * step
    ]
    return f"step {seconds_text(step)} = {' + '.join(shares)}"


def _roles(view: _View) -> list[str]:
    """How many arguments and results play which role."""
    program = view.program
    used, unused = "state, parameters", "state, read by the update only"
    numbers: dict[str, set[int]] = {}
    for argument in program.arguments:
        role = argument.attributes.role or "without a role"
        if role == "state":
            role = used if argument.value in program.parameters else unused
        numbers.setdefault(role, set()).add(argument.number)
    # A state that only the update reads on one mesh is a parameter all the same on another.
    if unused in numbers:
        numbers[unused] -= numbers.get(used, set())
    results: dict[str, set[int]] = {}
    for result in program.results:
        kind = result.attributes.role
        word = "without a role" if kind is None else "new state" if kind.kind == "state" else kind
        results.setdefault(str(word), set()).add(result.number)
    return ["roles", *_listed("argument", numbers), *_listed("result", results)]


def _listed(noun: str, groups: dict[str, set[int]]) -> list[str]:
    return [
        f"  {role}: {count_text(len(numbers), noun)} ({ranges_text(sorted(numbers))})"
        for role, numbers in groups.items()
        if numbers
    ]


def _layers(names: Sequence[str]) -> str:
    """`layer_2`, `layer_3` as `2-3`; other names as they are."""
    numbers = [name.removeprefix("layer_") for name in names]
    if numbers and all(number.isdigit() for number in numbers):
        return ranges_text(sorted(int(number) for number in numbers))
    return origin_name(tuple(Origin(name) for name in names)) if names else "-"
