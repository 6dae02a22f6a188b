"""What planned training steps take, beside what the figures of single ops say.

A chain of one op is the best case: its data are in the cache, its devices start together, and its
buffers exist. Small models (`models.py`) are planned with the figures of chains and run. Each of
their modules and steps is a sample: what the figures say, part by part, and what it takes. So are
the moves between meshes of a step of two stages.

On GPUs, modules are no samples, and steps run in a row: the host starts the kernels of a module
while the device computes what came before, and only a device that waits would show what that takes.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from alpa.dialects import body, ir, separate
from alpa.dialects.attributes import SECONDS, read_float
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import inside_host, message_seconds
from alpa.passes.cost.device import Kind, Link
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.annotated import Annotated, annotated_fragments
from alpa.passes.plan.instructions import Move, write_script
from alpa.passes.plan.predicted_collectives import Collective, collectives_of
from alpa.passes.plan.step_time import simulate, with_call
from alpa.passes.sharding.call_seconds import call_seconds
from alpa.passes.sharding.op_seconds import block_works, work_seconds
from alpa.passes.sharding.rules import populated
from alpa.runtime.calibration.models import Model
from alpa.runtime.executable import Executable
from alpa.runtime.loading import load
from alpa.runtime.planning import Inter, Settings, run_pass
from alpa.runtime.timing import TimedStep

CPU_MODELS = tuple(
    Model(kind=kind, width=width, length=length, batch=16)
    for kind, sizes in (
        ("attention", ((64, 32), (128, 64), (256, 64))),
        ("convolution", ((16, 16), (32, 16), (64, 16))),
    )
    for width, length in sizes
)
GPU_MODELS = tuple(
    Model(kind=kind, width=width, length=length, batch=batch, dtype="bfloat16")
    for kind, batch, sizes in (
        ("attention", 16, ((1024, 1024), (2048, 512), (2048, 1024))),
        ("convolution", 128, ((128, 56), (256, 28), (512, 28))),
    )
    for width, length in sizes
)
"""Large enough that the device takes longer than the host."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The seconds of a module, a call or moves by the figures of chains."""

    call: float = 0.0
    work: Mapping[Kind, float] = field(default_factory=dict["Kind", float])
    """without the starts of kernels; memory traffic counts as element-wise"""
    kernels: float = 0.0
    """their number"""
    collectives: float = 0.0
    """their number"""
    collective_seconds: float = 0.0
    step: float = 0.0
    """the call of a step"""
    moves: float = 0.0
    """between meshes"""


def together(parts: Sequence[Parts]) -> Parts:
    """The parts of all, one after the other."""
    work = defaultdict[Kind, float](float)
    for one in parts:
        for kind, seconds in one.work.items():
            work[kind] += seconds
    sums = {
        name: sum(getattr(one, name) for one in parts)
        for name in ("call", "kernels", "collectives", "collective_seconds", "step", "moves")
    }
    return Parts(work=work, **sums)


@dataclass(frozen=True, kw_only=True)
class ProgramSample:
    """What was measured of a planned step."""

    devices: int
    """that work, while the others wait"""
    what: Literal["module", "step", "moves"]
    """a module, the step with all its modules, or all its moves"""
    parts: Parts
    seconds: float
    """the median of several runs"""


def program_samples(
    devices: Sequence[Any],
    cluster_of: Callable[[int], str],
    models: Sequence[Model],
    runs: int,
    in_a_row: int | None = None,
) -> Iterator[ProgramSample]:
    """Samples of each model in several plans, on all devices, the first half of them, and so on.

    All take turns, so that what else the machine does is shared.

    Args:
        cluster_of: gives the text of a cluster file for one host with so many devices.
        in_a_row: so many steps are timed together, and no modules; None for each module and step.
    """
    timed, two = list[_Timed](), list[_Timed]()
    with tempfile.TemporaryDirectory() as folder:
        number = len(devices)
        while number:
            file = _written(cluster_of(number), folder)
            timed += _loaded(devices[:number], file, models)
            number //= 2
        if len(devices) % 2 == 0:
            file = _written(cluster_of(len(devices)), folder)
            two += _loaded(devices, file, models, stages=2)
    for each in (*timed, *two):
        for _ in range(3):
            each.step.run()
    for _ in range(runs):
        for each in timed:
            each.time_steps(in_a_row or 1)
        for each in (*(() if in_a_row else timed), *two):
            each.time_spans()
    for each in timed:
        yield from each.samples()
    for each in two:
        yield each.moves()


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """A planned step on the devices, and the seconds that it took."""

    devices: int
    machine: Cluster
    executable: Executable
    step: TimedStep
    parts: Sequence[Parts]
    """of each fragment"""
    whole: list[float] = field(default_factory=list[float])
    """seconds of each step"""
    spans: dict[str, list[float]] = field(
        default_factory=lambda: defaultdict[str, list[float]](list)
    )
    """seconds of each fragment, in other steps"""
    received: list[float] = field(default_factory=list[float])
    """seconds of all moves, in these steps"""

    def time_steps(self, in_a_row: int) -> None:
        """Runs steps, of which only the last one is waited for."""
        self.whole.append(self.step.run(in_a_row))

    def time_spans(self) -> None:
        """Runs a step that waits for each module and move."""
        with self.executable.trace() as trace:
            self.step.run()
        for span in trace.steps[0][0].spans:
            self.spans[span.row].append(span.end - span.begin)
        every = [span for mesh in trace.steps[0] for span in mesh.spans]
        moves = (span.end - span.begin for span in every if span.kind == "receive")
        self.received.append(sum(moves))

    def samples(self) -> Iterator[ProgramSample]:
        """Of each module that was timed, and of the step."""
        program = self.executable.program
        modules = zip(program.fragments, self.parts, strict=True) if self.spans else ()
        for fragment, parts in modules:
            name = fragment.name.removeprefix(f"{fragment.mesh}.")
            yield ProgramSample(
                devices=self.devices, what="module", parts=parts, seconds=median(self.spans[name])
            )
        call = Parts(step=with_call(0.0, program, self.machine))
        yield ProgramSample(
            devices=self.devices,
            what="step",
            parts=together([*self.parts, call]),
            seconds=median(self.whole),
        )

    def moves(self) -> ProgramSample:
        """Of all moves of a step."""
        events = simulate(write_script(self.executable.program))
        predicted = sum(it.end - it.start for it in events if isinstance(it.instruction, Move))
        return ProgramSample(
            devices=self.devices,
            what="moves",
            parts=Parts(moves=predicted),
            seconds=median(self.received),
        )


def _written(text: str, folder: str) -> str:
    """The path of a file with a text."""
    path = Path(folder) / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _loaded(
    devices: Sequence[Any], cluster: str, models: Sequence[Model], stages: int = 1
) -> Iterator[_Timed]:
    machine = Cluster.parse(cluster)
    for model in models:
        module, arguments = model.lower(), model.arguments()
        for settings in _settings(cluster, len(devices), stages):
            planned = separate(module.operation)
            layers = {} if stages == 1 else {"num-layers": str(stages)}
            run_pass("alpa", {**settings.options(), **layers}, planned, Clock())
            run_pass("export-stages", {}, planned, Clock())
            executable = load(planned, devices=devices)
            yield _Timed(
                devices=len(devices),
                machine=machine,
                executable=executable,
                step=TimedStep(executable, arguments),
                parts=module_parts(planned, machine) if stages == 1 else (),
            )


def _settings(cluster: str, devices: int, stages: int) -> Iterator[Settings]:
    """Plans of equal stages: of samples alone, and also of weights, with groups of two sizes."""
    each = devices // stages
    inter: Inter = "none" if stages == 1 else "equal-layers"
    shape = "auto" if stages == 1 else str(each)
    yield Settings(cluster=cluster, inter=inter, intra="data-parallel", mesh_shape=shape)
    if each > 2 and each % 2 == 0:
        yield Settings(cluster=cluster, inter=inter, intra="megatron", mesh_shape=f"{each // 2}x2")


def module_parts(planned: ir.Module, cluster: Cluster) -> list[Parts]:
    """The parts of the seconds of each fragment of a plan for one micro-batch and one mesh."""
    with populated(planned):
        return [_parts(each, cluster) for each in annotated_fragments(planned)]


def _parts(annotated: Annotated, cluster: Cluster) -> Parts:
    fragment, device = annotated.fragment, cluster.device
    devices = annotated.mesh.num_devices
    call = call_seconds(fragment, 1, cluster, devices)
    found = [it for it in collectives_of(annotated) if it.devices > 1]
    exchanged = sum(_seconds(it, cluster.intra_host) for it in found)
    # Of an even split. The plan may repeat some of it, so only the shares of the kinds are taken.
    works, even = block_works(body(fragment), device), defaultdict[Kind, float](float)
    kernels = sum(work.kernels for work in works)
    for work in works:
        compute = device.seconds(work.flops, 0.0, work.dtype, 1 / devices, work.kind)
        seconds = work_seconds(work, device, 1 / devices) - work.kernels * device.launch
        moves = float(seconds) > float(compute)
        even["elementwise" if moves else work.kind] += float(seconds)
    predicted = read_float(fragment, SECONDS) or 0.0
    rest = max(predicted - call - exchanged - kernels * device.launch, 0.0)
    share = rest / max(sum(even.values()), 1e-12)
    return Parts(
        call=call,
        work={kind: seconds * share for kind, seconds in even.items()},
        kernels=kernels,
        collectives=float(sum(it.count for it in found)),
        collective_seconds=exchanged,
    )


def _seconds(collective: Collective, link: Link) -> float:
    """Seconds of collectives of one kind and size inside a host."""
    if collective.kind == "collective-permute":
        each = message_seconds(link, 1, float(collective.bytes))
    else:
        cost = inside_host(collective.kind, link, collective.devices)
        each = float(cost.seconds(float(collective.bytes)))
    return collective.count * each
