"""Prints a planned program for people: `python -m alpa.tools.plan_table PLANNED.mlir`.

Everything is read from the IR: `alpa.plan`, `alpa.meshes`, the fragments' predicted seconds, and
the shardings of arguments, activations and transfers. So the table says what is planned, not what
was meant.

Seconds of a stage are the plan's roofline compute of one micro-batch; the predicted step adds
transfers, the synchronisation of gradients and the update. Peak bytes are the prediction of
`stage-mesh-partition`, which divides everything evenly; state bytes are by the shardings.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from alpa.dialects import body, format_error, ir, main_function, parse_file
from alpa.dialects.attributes import SECONDS, Reshard, read_float
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes import PassError
from alpa.passes.analysis import planned
from alpa.passes.analysis.planned import DeviceMesh, Program, Transfer, Value, origin_name
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import size_text
from alpa.passes.pipelines.diagnostics import place_of
from alpa.runtime.instructions import Move, gpipe
from alpa.runtime.placement import numpy_dtype

_PATTERNS = 4  # that a row lists before it sums up the rest
_RANGES = 3
_EXAMPLE = """\
example:
  alpa-opt step.mlir --pipeline='alpa{cluster=cpu:2x4 num-micro-batches=4}' -o planned.mlir
  python -m alpa.tools.plan_table planned.mlir
"""


def plan_table(module: ir.Module) -> str:
    """The plan of a module that `stage-mesh-partition`, at least, has run on.

    Raises:
        CheckError, PassError: the module is not a planned one.
    """
    check_planned(module)
    program = planned.read(module)
    ops = list(body(main_function(module)).operations)
    steps = {
        number: read_float(op, SECONDS) or 0.0
        for number, op in enumerate(ops[:-1])
        if not isinstance(program.steps[number], Transfer)
    }
    reshards = {
        number: Reshard.read(op)
        for number, op in enumerate(ops[:-1])
        if isinstance(program.steps[number], Transfer)
    }
    view = _View(program=program, seconds=steps, reshards=reshards)
    parts = (_header, _stages, _limits, _transfers, _strategy, _roles)
    sections = ["\n".join(part(view)) for part in parts]
    return "\n\n".join(section for section in sections if section) + "\n"


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """One mesh, with the predicted seconds of one micro-batch and bytes per device."""

    number: int
    mesh: DeviceMesh
    layers: str
    forward: float
    backward: float
    update: float
    state_bytes: int
    peak_bytes: int | None

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class _View:
    """A program with what is only in the IR: seconds and reshards by the number of the step."""

    program: Program
    seconds: dict[int, float]
    reshards: dict[int, Reshard | None]

    @cached_property
    def cluster(self) -> Cluster | None:
        """None where the plan names none, or a file that is not here."""
        try:
            return Cluster.parse(self.program.plan.cluster)
        except ClusterError:
            return None

    @cached_property
    def stages(self) -> list[_Stage]:
        program, peaks = self.program, self.program.plan.predicted_peak_bytes
        stages: list[_Stage] = []
        for number, mesh in enumerate(program.meshes):
            seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0, "update": 0.0}
            names: dict[str, None] = {}
            for index, step in enumerate(program.steps):
                if isinstance(step, Transfer) or step.mesh != mesh.name:
                    continue
                seconds[step.part] += self.seconds[index]
                if step.part == "forward":
                    names.update(dict.fromkeys(origin.name for origin in step.origins))
            states = {a.value for a in program.arguments if a.attributes.role == "state"}
            here = [v for v in states if program.values[v].mesh == mesh.name]
            stages.append(
                _Stage(
                    number=number,
                    mesh=mesh,
                    layers=_layers(list(names)),
                    forward=seconds["forward"],
                    backward=seconds["backward"],
                    update=seconds["update"],
                    state_bytes=sum(self.local_bytes(v) for v in here),
                    peak_bytes=peaks[number] if number < len(peaks) else None,
                )
            )
        return stages

    @cached_property
    def parameters(self) -> frozenset[int]:
        """State arguments that a forward or backward part reads; the others are the optimizer's."""
        read = {v for f in self.program.fragments if f.part != "update" for v in f.inputs}
        for step in reversed(self.program.transfers):
            read |= {step.source} if step.target in read else set()
        states = {a.value for a in self.program.arguments if a.attributes.role == "state"}
        return frozenset(states & read)

    def bytes(self, value: int) -> int:
        """The bytes of a whole value."""
        it = self.program.values[value]
        return prod(it.shape) * numpy_dtype(it.dtype).itemsize

    def local_bytes(self, value: int) -> int:
        """The bytes that one device of its mesh holds of a value."""
        it = self.program.values[value]
        sizes = [
            -(-size // prod(self.ways(it, axis) for axis in axes))
            for size, axes in zip(it.shape, _dims(it), strict=True)
        ]
        return prod(sizes) * numpy_dtype(it.dtype).itemsize

    def ways(self, value: Value, axis: str) -> int:
        mesh = next(mesh for mesh in self.program.meshes if mesh.name == value.mesh)
        return dict(mesh.axes)[axis]

    def pattern(self, value: int, batch_dim: int | None = None) -> str:
        """A value's sharding in words: `dim 0 on axis0, dim 1 on axis1`."""
        it = self.program.values[value]
        if it.sharding is None:
            return "not sharded yet"
        words: list[str] = []
        for number, axes in enumerate(_dims(it)):
            split = [axis for axis in axes if self.ways(it, axis) > 1]
            if split:
                name = "batch" if number == batch_dim else f"dim {number}"
                words.append(f"{name} on {'+'.join(split)}")
        return ", ".join(words) or "replicated"


def _dims(value: Value) -> tuple[tuple[str, ...], ...]:
    return value.sharding.axis_names if value.sharding else ((),) * len(value.shape)


def _header(view: _View) -> list[str]:
    plan, cluster = view.program.plan, view.cluster
    machine = plan.cluster or "a cluster of no name"
    if cluster is not None:
        machine += f" ({_count(cluster.hosts, 'host')} x {cluster.devices_per_host} "
        machine += f"{cluster.device.name})"
    return [
        f"plan for {machine}: {_count(len(view.stages), 'stage')}, "
        f"{_count(plan.num_micro_batches, 'micro-batch', 'micro-batches')}, {plan.schedule}, "
        f"predicted step {_seconds(plan.predicted_step_seconds)}"
    ]


def _stages(view: _View) -> list[str]:
    memory = view.cluster.device.memory if view.cluster else None
    columns = ["stage", "mesh", "hosts", "devices", "shape", "layers", "forward", "backward"]
    columns += ["update", "state", "peak"] + (["memory"] if memory else [])
    rows = [columns]
    for stage in view.stages:
        row = [
            str(stage.number),
            stage.mesh.name,
            _ranges(stage.mesh.hosts),
            _ranges(stage.mesh.devices),
            "x".join(str(size) for _, size in stage.mesh.axes),
            stage.layers,
            *(_seconds(value) for value in (stage.forward, stage.backward, stage.update)),
            size_text(stage.state_bytes),
            "-" if stage.peak_bytes is None else size_text(stage.peak_bytes),
        ]
        if memory:
            row.append("-" if stage.peak_bytes is None else _percent(stage.peak_bytes / memory))
        rows.append(row)
    notes = "seconds per micro-batch, of the update per step; bytes per device"
    if memory:
        notes += f"; peak as a share of {size_text(memory)}"
    return [*_aligned(rows), f"({notes})"]


def _strategy(view: _View) -> list[str]:
    """What is split over which axes; stages of which the same can be said stand together."""
    blocks: dict[tuple[str, ...], list[int]] = {}
    for stage in view.stages:
        axes = ", ".join(f"{name}={size}" for name, size in stage.mesh.axes)
        block = (axes, *_stage_strategy(view, stage))
        blocks.setdefault(block, []).append(stage.number)
    lines = ["strategy"]
    for (axes, *rows), numbers in blocks.items():
        noun = "stage" if len(numbers) == 1 else "stages"
        lines += [f"  {noun} {_ranges(numbers)} ({axes})", *rows]
    return lines


def _stage_strategy(view: _View, stage: _Stage) -> list[str]:
    """Batch, parameters, optimizer and activations of a stage."""
    program = view.program
    dims = {a.value: a.attributes.batch_dim for a in program.arguments}
    roles = {a.value: a.attributes.role for a in program.arguments}
    made = {v for f in program.fragments if f.part == "forward" for v in f.outputs}
    made |= {t.target for t in program.transfers if program.parts[t.target] == "forward"}
    kept = {v for f in program.fragments if f.part == "backward" for v in f.inputs if v in made}
    optimizer = {v for v, role in roles.items() if role == "state"} - view.parameters
    groups = {
        "batch": [v for v, role in roles.items() if role == "batch"],
        "parameters": sorted(view.parameters),
        "state that only the update reads": sorted(optimizer),
        "activations that the backward part reads": sorted(kept),
    }
    lines: list[str] = []
    for title, values in groups.items():
        here = [v for v in values if program.values[v].mesh == stage.mesh.name]
        if here:
            patterns = [(view.pattern(v, dims.get(v)), view.bytes(v)) for v in here]
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
    lines = [f"    {title}: {_count(len(patterns), 'tensor')}, {size_text(total)}"]
    for pattern in order[:_PATTERNS]:
        share = f" = {_percent(sizes[pattern] / total)}" if total and len(order) > 1 else ""
        lines.append(
            f"      {pattern}: {counts[pattern]} of {len(patterns)}, "
            f"{size_text(sizes[pattern])}{share}"
        )
    rest = order[_PATTERNS:]
    if rest:
        lines.append(
            f"      {_count(len(rest), 'other layout')}: {sum(counts[p] for p in rest)} of "
            f"{len(patterns)}, {size_text(sum(sizes[p] for p in rest))}"
        )
    return lines


def _transfers(view: _View) -> list[str]:
    """What crosses between stages: per micro-batch, or once per step."""
    program = view.program
    moved = {i.target: i.source for i in gpipe(program).instructions if isinstance(i, Move)}
    stage_of = {stage.mesh.name: stage.number for stage in view.stages}
    groups: dict[tuple[str, int, int], list[int]] = {}
    for number, step in enumerate(program.steps):
        if not isinstance(step, Transfer):
            continue
        source, target = (stage_of[program.values[v].mesh] for v in (step.source, step.target))
        for when, m in (("micro-batch", 0), ("step", None)):
            if (step.target, m) in moved:
                groups.setdefault((when, source, target), []).append(number)
    if not groups:
        return []
    rows = [["crosses", "per", "values", "bytes", "between hosts", "inside hosts", "methods"]]
    for (when, source, target), numbers in sorted(groups.items()):
        reshards = [view.reshards[number] for number in numbers]
        known = [reshard for reshard in reshards if reshard]
        methods = Counter(reshard.method for reshard in known)
        targets = [step.target for n in numbers if isinstance(step := program.steps[n], Transfer)]
        complete = len(known) == len(reshards)
        rows.append(
            [
                f"{source} -> {target}",
                when,
                str(len(numbers)),
                size_text(sum(view.bytes(value) for value in targets)),
                size_text(sum(reshard.slow_bytes for reshard in known)) if complete else "-",
                size_text(sum(reshard.fast_bytes for reshard in known)) if complete else "-",
                ", ".join(f"{m} {n}" for m, n in methods.most_common()) or "not decided yet",
            ]
        )
    return _aligned(rows, left=(0, 1, 6))


def _limits(view: _View) -> list[str]:
    plan, stages = view.program.plan, view.stages
    batches, count = plan.num_micro_batches, len(stages)
    lines = ["what limits it"]
    total = sum(stage.seconds for stage in stages)
    slowest = max(stages, key=lambda stage: stage.seconds)
    if count > 1 and total:
        lines.append(f"  {_balance(slowest, total, count)}")
    lines.append(f"  {_bubble(count, batches)}")
    if plan.predicted_step_seconds and total:
        word = "compute" if count == 1 else "slowest stage"
        parts = [
            (batches * slowest.seconds, f"{word} ({batches} x {_seconds(slowest.seconds)})"),
            (total - slowest.seconds, "fill and drain"),
        ]
        lines.append(f"  {_step_seconds(plan.predicted_step_seconds, parts)}")
    if view.cluster and any(stage.peak_bytes for stage in stages):
        memory = view.cluster.device.memory
        fullest = max(stages, key=lambda stage: stage.peak_bytes or 0)
        free = memory - (fullest.peak_bytes or 0)
        lines.append(
            f"  memory: stage {fullest.number} is the fullest; {size_text(free)} of "
            f"{size_text(memory)} per device stay free ({_percent(free / memory)})"
        )
    lines += [
        f"  stage {stage.number} holds {size_text(stage.state_bytes)} of state per device, more "
        "than its predicted peak, which assumes an even split"
        for stage in stages
        if stage.peak_bytes is not None and stage.state_bytes > stage.peak_bytes
    ]
    return lines


def _bubble(stages: int, batches: int) -> str:
    if stages == 1:
        return "one stage: no pipeline, so no bubble"
    bubble = (stages - 1) / (stages - 1 + batches)
    text = f"pipeline bubble: (S-1)/(S-1+B) = {_percent(bubble)} with S={stages} stages and "
    if batches == 1:
        return f"{text}one micro-batch: the stages wait for one another, only memory is gained"
    more = (stages - 1) / (stages - 1 + 4 * batches)
    return f"{text}B={batches} micro-batches; {4 * batches} would make it {_percent(more)}"


def _balance(slowest: _Stage, total: float, count: int) -> str:
    share = slowest.seconds / total
    if share * count < 1.005:
        return f"the stages are balanced: each takes {_seconds(slowest.seconds)} per micro-batch"
    return (
        f"stage {slowest.number} is the slowest: {_seconds(slowest.seconds)} of {_seconds(total)} "
        f"per micro-batch, {_percent(share)} where {_percent(1 / count)} would be even"
    )


def _step_seconds(step: float, parts: Sequence[tuple[float, str]]) -> str:
    """The predicted step by what it is spent on; what no part explains is no compute."""
    rest = step - sum(seconds for seconds, _ in parts)
    shares = [
        f"{_percent(seconds / step)} {text}"
        for seconds, text in [*parts, (rest, "transfers and update")]
        if seconds > 1e-4 * step
    ]
    return f"step {_seconds(step)} = {' + '.join(shares)}"


def _roles(view: _View) -> list[str]:
    """How many arguments and results play which role."""
    program = view.program
    numbers: dict[str, set[int]] = {}
    for argument in program.arguments:
        role = argument.attributes.role or "without a role"
        if role == "state":
            role = (
                "state, parameters"
                if argument.value in view.parameters
                else "state, read by the update only"
            )
        numbers.setdefault(role, set()).add(argument.number)
    # A state that only the update reads on one mesh is a parameter all the same on another.
    both = numbers.get("state, read by the update only", set()) & numbers.get(
        "state, parameters", set()
    )
    if both:
        numbers["state, read by the update only"] -= both
    results: dict[str, set[int]] = {}
    for result in program.results:
        kind = result.attributes.role
        word = "without a role" if kind is None else "new state" if kind.kind == "state" else kind
        results.setdefault(str(word), set()).add(result.number)
    return ["roles", *_listed("argument", numbers), *_listed("result", results)]


def _listed(noun: str, groups: dict[str, set[int]]) -> list[str]:
    return [
        f"  {role}: {_count(len(numbers), noun)} ({_ranges(sorted(numbers))})"
        for role, numbers in groups.items()
        if numbers
    ]


def _layers(names: Sequence[str]) -> str:
    """`layer_2`, `layer_3` as `2-3`; other names as they are."""
    numbers = [name.removeprefix("layer_") for name in names]
    if numbers and all(number.isdigit() for number in numbers):
        return _ranges(sorted(int(number) for number in numbers))
    return origin_name(tuple(planned.Origin(name) for name in names)) if names else "-"


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,5`; more than a few ranges are cut short."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    return ",".join(texts[:_RANGES]) + (",..." if len(texts) > _RANGES else "")


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def _percent(share: float) -> str:
    if 0 < share < 5e-4:
        return "<0.1%"
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


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
        with open(options.file, "rb"):
            pass  # MLIR's own message for a file that cannot be read names no reason.
        sys.stdout.write(plan_table(parse_file(options.file)))
    except OSError as error:
        print(f"{options.file}: error: {error.strerror}", file=sys.stderr)
    except ir.MLIRError as error:
        print(format_error(error), file=sys.stderr)
    except (CheckError, PassError) as error:
        print(f"{place_of(error.location)}: error: {error.message}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
