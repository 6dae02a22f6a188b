"""The figures of the cost model that fit what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import cast

import numpy as np
from scipy.optimize import nnls

from alpa.passes.cost.device import (
    Collective,
    Cost,
    Device,
    Efficiency,
    Link,
    Machine,
    Points,
)
from alpa.runtime.calibration.measure import Sample


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A machine, and how well its figures give back the samples."""

    machine: Machine
    residuals: Mapping[str, float]
    """by what was measured: the mean of |predicted / measured - 1|"""
    spread: float
    """the median of the samples'"""


def fit(samples: Iterable[Sample], *, name: str, memory: int, inter_host: Link) -> Fit:
    """Fits a machine's figures; of the link between hosts nothing is known.

    Raises:
        ValueError: no matrix product with f32 or no memory traffic was measured.
    """
    by_what: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_what[sample.what].append(sample)
    launch = by_what["launch"][0].seconds if by_what["launch"] else 0.0
    rates = {
        what.removeprefix("matrix "): _rates(found, launch)
        for what, found in by_what.items()
        if what.startswith("matrix ")
    }
    moved = _rates(by_what["memory"], launch)
    if "f32" not in rates or not moved:
        raise ValueError("matrix products with f32 and memory traffic must be measured")
    costs: dict[Collective, dict[int, Cost]] = defaultdict(dict)
    for what, found in by_what.items():
        kind, _, size = what.partition(" ")
        if size.isdecimal():
            costs[cast("Collective", kind)][int(size)] = _line(found)
    transfer = _line(by_what["transfer"]) if by_what["transfer"] else Cost(0.0, 0.0)
    device = Device(
        name=name,
        memory=memory,
        peak_flops={dtype: _best(points) for dtype, points in rates.items()},
        memory_bandwidth=_best(moved),
        efficiency=Efficiency(
            matrix={dtype: _shares(points) for dtype, points in rates.items()},
            memory=_shares(moved),
        ),
        launch=launch,
    )
    intra_host = Link(
        bandwidth=1 / transfer.per_byte if transfer.per_byte > 0 else device.memory_bandwidth,
        latency=transfer.start,
        overlap=by_what["overlap"][0].seconds if by_what["overlap"] else 0.0,
        collectives=dict(costs),
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
    if kind == "matrix":
        return device.launch + float(device.seconds(sample.size, 0.0, detail))
    if kind == "memory":
        return device.launch + float(device.seconds(0.0, sample.size, "f32"))
    if kind == "launch":
        return device.launch
    if kind == "transfer":
        return machine.intra_host.latency + sample.size / machine.intra_host.bandwidth
    if kind == "overlap":
        return machine.intra_host.overlap
    found = machine.intra_host.collectives.get(cast("Collective", kind), {}).get(int(detail))
    return None if found is None else found.start + found.per_byte * sample.size


def _rates(samples: Sequence[Sample], launch: float) -> list[tuple[float, float]]:
    """Sizes, and size per second beside the start of the kernel; without those that are little but
    this start."""
    ordered = sorted(samples, key=lambda it: it.size)
    clear = [it for it in ordered if it.seconds > 2 * launch] or ordered[-1:]
    return [(it.size, it.size / max(it.seconds - launch, 0.1 * it.seconds)) for it in clear]


def _best(rates: Sequence[tuple[float, float]]) -> float:
    return max(rate for _, rate in rates)


def _shares(rates: Sequence[tuple[float, float]]) -> Points:
    return tuple((size, rate / _best(rates)) for size, rate in rates)


def _line(samples: Sequence[Sample]) -> Cost:
    """Start and seconds per byte, neither negative, with the least relative squared errors."""
    rows = np.array([[1 / it.seconds, it.size / it.seconds] for it in samples])
    scale = rows.max(axis=0)
    found, _ = nnls(rows / scale, np.ones(len(rows)))
    start, per_byte = found / scale
    return Cost(float(start), float(per_byte))


def _residuals(machine: Machine, by_what: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for what, samples in by_what.items():
        seconds = [(predicted(machine, it), it.seconds) for it in samples]
        errors = [abs(p / s - 1) for p, s in seconds if p is not None and s > 0]
        if errors:
            found[what] = fmean(errors)
    return found
