"""The figures of the cost model that fit what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, geometric_mean, median
from typing import cast, get_args

import numpy as np
from scipy.optimize import nnls

from alpa.passes.cost.device import (
    Call,
    Collective,
    Curve,
    Device,
    Efficiency,
    Kind,
    Link,
    Machine,
    Points,
    Transfer,
)
from alpa.runtime.calibration.measure import BYTES_PER_OP, Sample

_COMPUTE = ("matrix", "convolution")
_RINGS = ("all-gather", "reduce-scatter")
_PER_KERNEL = 4.0
"""The arguments and results that a call's sample has for each kernel."""

Rates = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine, and how well its figures give back the samples."""

    machine: Machine
    residuals: Mapping[str, float]
    """by what was measured: the mean of |predicted / measured - 1|"""
    spread: float
    """the median of the samples'"""
    programs: Mapping[str, float] = field(default_factory=dict[str, float])
    """what was fitted to programs (`in_programs.py`)"""


def fit(samples: Iterable[Sample], *, name: str, memory: int, inter_host: Link) -> Fit:
    """Fits a machine's figures; of the link between hosts nothing is known.

    Raises:
        ValueError: no matrix product with f32 or no memory traffic was measured.
    """
    by_what: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_what[sample.what].append(sample)
    launch = by_what["launch"][0].seconds if by_what["launch"] else 0.0
    products, convolutions = (_by_type(by_what, kind, launch) for kind in _COMPUTE)
    moved = _rates(by_what["memory"], launch)
    if "f32" not in products or not moved:
        raise ValueError("matrix products with f32 and memory traffic must be measured")
    costs: dict[Collective, dict[int, Curve]] = defaultdict(dict)
    for what, found in by_what.items():
        kind, _, size = what.partition(" ")
        if kind in get_args(Collective):
            costs[cast("Collective", kind)][int(size)] = _curve(found)
    peaks = {
        dtype: max(_best(points), _best(convolutions.get(dtype, points)))
        for dtype, points in products.items()
    }
    bandwidth = _best(moved)
    elementwise = _beside_memory(by_what["elementwise"], moved, launch)
    device = Device(
        name=name,
        memory=memory,
        peak_flops=peaks,
        memory_bandwidth=bandwidth,
        efficiency=Efficiency(
            matrix={dtype: _shares(points, peaks[dtype]) for dtype, points in products.items()},
            memory=_shares(moved, bandwidth),
            convolution={
                dtype: _shares(points, peaks[dtype]) for dtype, points in convolutions.items()
            },
            elementwise=_shares(elementwise, peaks["f32"]),
        ),
        launch=launch,
        call=_call(by_what, launch),
    )
    moves = _line(by_what["transfer"], bandwidth)
    steps = _ring_step(by_what, bandwidth) or moves
    reached = steps or Transfer(bandwidth=bandwidth, latency=0.0)
    intra_host = Link(
        bandwidth=reached.bandwidth,
        latency=reached.latency,
        overlap=by_what["overlap"][0].seconds if by_what["overlap"] else 0.0,
        collectives=dict(costs),
        transfer=moves,
    )
    machine = Machine(device=device, intra_host=intra_host, inter_host=inter_host)
    return Fit(
        machine=machine,
        residuals=_residuals(machine, by_what),
        spread=median(sample.spread for found in by_what.values() for sample in found),
    )


def predicted(machine: Machine, sample: Sample) -> float | None:
    """The seconds that a machine's figures give for a sample; None if they say nothing of it."""
    device, kind, detail = machine.device, *sample.what.partition(" ")[::2]
    if kind in get_args(Kind):
        work = device.seconds(sample.size, 0.0, detail or "f32", 1.0, cast("Kind", kind))
        return device.launch + float(work)
    if kind == "call":
        kernels = sample.size / _PER_KERNEL * device.launch
        return kernels + device.call.seconds(sample.size, int(detail)) + device.call.start
    if kind == "memory":
        return device.launch + float(device.seconds(0.0, sample.size, "f32"))
    if kind == "launch":
        return device.launch
    if kind == "transfer":
        bandwidth, latency = machine.intra_host.between_meshes
        return latency + sample.size / bandwidth
    if kind == "overlap":
        return machine.intra_host.overlap
    found = machine.intra_host.collectives.get(cast("Collective", kind), {}).get(int(detail))
    return None if found is None else float(found.seconds(sample.size))


def _by_type(by_what: Mapping[str, Sequence[Sample]], kind: str, launch: float) -> dict[str, Rates]:
    """The rates of matrix products or convolutions by element type."""
    return {
        what.partition(" ")[2]: _rates(found, launch)
        for what, found in by_what.items()
        if what.startswith(f"{kind} ")
    }


def _rates(samples: Sequence[Sample], launch: float) -> Rates:
    """Sizes, and size per second beside the start of the kernel; without those that are little but
    this start. Of several samples of a size, their geometric mean."""
    times: dict[float, list[float]] = defaultdict(list)
    for it in samples:
        times[it.size].append(it.seconds)
    ordered = [(size, geometric_mean(found)) for size, found in sorted(times.items())]
    clear = [it for it in ordered if it[1] > 2 * launch] or ordered[-1:]
    return [(size, size / max(seconds - launch, 0.1 * seconds)) for size, seconds in clear]


def _beside_memory(samples: Sequence[Sample], moved: Rates, launch: float) -> Rates:
    """The rates of element-wise ops, which read and write each element once.

    Where this takes half of the time or more, as on GPUs, only the rest is of the ops.
    """
    if not samples:
        return []
    sizes, rates = zip(*moved, strict=True)
    found: list[Sample] = []
    for it in samples:
        num_bytes = BYTES_PER_OP * it.size
        memory = num_bytes / float(np.interp(np.log(num_bytes), np.log(sizes), rates))
        rest = it.seconds - memory if memory > it.seconds / 2 else it.seconds
        found.append(replace(it, seconds=max(rest, 0.1 * it.seconds)))
    return _rates(found, launch)


def _best(rates: Rates) -> float:
    return max(rate for _, rate in rates)


def _shares(rates: Rates, peak: float) -> Points:
    return tuple((size, min(rate / peak, 1.0)) for size, rate in rates)


def _curve(samples: Sequence[Sample]) -> Curve:
    """Bytes and seconds; more bytes take no less."""
    ordered = sorted(samples, key=lambda it: it.size)
    seconds = np.maximum.accumulate([it.seconds for it in ordered]).tolist()
    return Curve(tuple(zip((it.size for it in ordered), seconds, strict=True)))


def _call(by_what: Mapping[str, Sequence[Sample]], launch: float) -> Call:
    """What calls take beside their kernels, with the least relative squared errors.

    Each sample is two calls that share their arguments.
    """
    rows: list[list[float]] = []
    for what, found in by_what.items():
        kind, _, devices = what.partition(" ")
        for it in found if kind == "call" else ():
            seconds = max(it.seconds - it.size / _PER_KERNEL * launch, 0.1 * it.seconds)
            rows.append([2 / seconds, it.size / seconds, it.size * int(devices) / seconds])
    return Call(*_least(rows)) if rows else Call()


def _line(samples: Sequence[Sample], most: float) -> Transfer | None:
    """What messages reach, with the least relative squared errors."""
    return _reached([[1 / it.seconds, it.size / it.seconds] for it in samples], most)


def _ring_step(by_what: Mapping[str, Sequence[Sample]], most: float) -> Transfer | None:
    """What one step of a ring reaches, as all-gathers and reduce-scatters show it.

    On n devices they take n - 1 steps, each with 1/n of the bytes.
    """
    rows: list[list[float]] = []
    for what, found in by_what.items():
        kind, _, devices = what.partition(" ")
        for it in found if kind in _RINGS else ():
            steps = int(devices) - 1
            rows.append([steps / it.seconds, steps / int(devices) * it.size / it.seconds])
    return _reached(rows, most)


def _reached(rows: Sequence[Sequence[float]], most: float) -> Transfer | None:
    """Latency and bandwidth of rows that they give seconds of; None without rows.

    If more bytes take no longer, the latency is all that was measured, and the bandwidth is `most`.
    """
    if not rows:
        return None
    latency, per_byte = _least(rows)
    return Transfer(bandwidth=1 / per_byte if per_byte > 0 else most, latency=latency)


def _least(rows: Sequence[Sequence[float]]) -> list[float]:
    """The factors, none negative, with which each row's sum is 1 with the least squared errors."""
    table = np.array(rows)
    scale = table.max(axis=0)
    found, _ = nnls(table / scale, np.ones(len(table)))
    return (found / scale).tolist()


def _residuals(machine: Machine, by_what: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for what, samples in by_what.items():
        seconds = [(predicted(machine, it), it.seconds) for it in samples]
        errors = [abs(p / s - 1) for p, s in seconds if p is not None and s > 0]
        if errors:
            found[what] = fmean(errors)
    return found
