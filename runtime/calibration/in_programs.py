"""The figures of chains, corrected by what planned training steps take.

The seconds of a module are, with the parts that `programs.py` gives,

    call + collective_seconds + kernels * (launch + more) + sum of factor[kind] * work[kind]
         + collectives * wait,

those of a step are the sum of its modules' and `step` times its call, and those of its moves
between meshes `transfer` times what they take alone. The factors, `step` and `transfer` are at
least 1, `more` and `wait` at least 0: programs never do better than chains. They are the same for
all models and sizes, and are found with the least errors of the logarithms, in which a few outliers
count little.

The corrected figures stay figures of the cluster file: shares of efficiency are divided by the
factors, `launch` and each measured collective get more seconds, and transfers are slower by
`transfer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean, geometric_mean

import numpy as np
from scipy.optimize import least_squares

from alpa.passes.cost.device import (
    Call,
    Collectives,
    Cost,
    Curve,
    Device,
    Efficiency,
    Kind,
    Points,
    Transfer,
)
from alpa.runtime.calibration.fit import Fit
from alpa.runtime.calibration.programs import ProgramSample

_KINDS: tuple[Kind, ...] = ("matrix", "convolution", "elementwise")
_NAMES = ("step", *_KINDS, "launch", "wait", "transfer")
_LEAST = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
_UNIT = np.array([1.0, 1.0, 1.0, 1.0, 1e-5, 1e-5, 1.0])
"""Seconds are fitted in units that make all numbers of one size."""
_OUTLIER = 0.2


def in_programs(found: Fit, samples: Iterable[ProgramSample]) -> Fit:
    """The fit with corrected figures, what they were corrected by, and how well they give back the
    samples."""
    listed = list(samples)
    most = max((it.devices for it in listed), default=0)
    whole = [it for it in listed if it.devices == most]
    if not whole:
        return found
    device = found.machine.device
    numbers = _fitted(whole, device.launch)
    named: dict[str, float] = dict(zip(_NAMES, numbers.tolist(), strict=True))
    link = found.machine.intra_host
    machine = replace(
        found.machine,
        device=replace(
            _slower(device, named),
            launch=device.launch + named["launch"],
            step=Call(*(named["step"] * it for it in device.call)),
            alone=_alone(listed, numbers, device.launch, most),
        ),
        intra_host=replace(
            link,
            collectives=_later(link.collectives, named["wait"]),
            transfer=_dearer(link.transfer, named["transfer"]),
        ),
    )
    error = fmean(abs(_predicted(it, numbers, device.launch) / it.seconds - 1) for it in whole)
    residuals = {**found.residuals, "programs": error}
    return replace(found, machine=machine, residuals=residuals, programs=named)


def _row(sample: ProgramSample, launch: float) -> tuple[float, list[float]]:
    """What is not fitted, and the factors of what is, in the order of `_NAMES`."""
    parts = sample.parts
    work = [parts.work.get(kind, 0.0) for kind in _KINDS]
    fixed = parts.call + parts.collective_seconds + parts.kernels * launch
    return fixed, [parts.step, *work, parts.kernels, parts.collectives, parts.moves]


def _predicted(sample: ProgramSample, numbers: np.ndarray, launch: float) -> float:
    fixed, factors = _row(sample, launch)
    return fixed + float(np.dot(factors, numbers))


def _fitted(samples: Sequence[ProgramSample], launch: float) -> np.ndarray:
    """The numbers of `_NAMES`; those that no sample shows are the least."""
    rows = [_row(it, launch) for it in samples]
    fixed = np.array([it for it, _ in rows])
    table = np.array([it for _, it in rows]) * _UNIT
    measured = np.log([it.seconds for it in samples])
    shown = table.any(axis=0)

    def errors(numbers: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(fixed + table[:, shown] @ numbers, 1e-9)) - measured

    least = (_LEAST / _UNIT)[shown]
    result = least_squares(
        errors, least + 1.0, bounds=(least, np.inf), loss="soft_l1", f_scale=_OUTLIER
    )
    numbers = _LEAST.copy()
    numbers[shown] = result.x * _UNIT[shown]
    return numbers


def _slower(device: Device, factors: Mapping[str, float]) -> Device:
    """The device with smaller shares of its peaks, by the kind of work."""
    efficiency = device.efficiency
    if efficiency is None:
        return device

    def less(points: Points, kind: Kind) -> Points:
        return tuple((size, share / factors[kind]) for size, share in points)

    # Convolutions and element-wise ops that were not measured have the shares of products.
    return replace(
        device,
        efficiency=Efficiency(
            matrix={it: less(points, "matrix") for it, points in efficiency.matrix.items()},
            memory=less(efficiency.memory, "elementwise"),
            convolution={
                it: less(points, "convolution") for it, points in efficiency.convolution.items()
            },
            elementwise=less(efficiency.elementwise, "elementwise"),
        ),
    )


def _later(collectives: Collectives, wait: float) -> Collectives:
    """Collectives that start after so many seconds of waiting for the other devices."""

    def later(cost: Cost | Curve) -> Cost | Curve:
        if isinstance(cost, Cost):
            return cost._replace(start=cost.start + wait)
        return Curve(tuple((size, seconds + wait) for size, seconds in cost.points))

    return {
        kind: {size: later(cost) for size, cost in sizes.items()}
        for kind, sizes in collectives.items()
    }


def _dearer(transfer: Transfer | None, factor: float) -> Transfer | None:
    """Transfers that take so many times as long."""
    if transfer is None:
        return None
    return Transfer(bandwidth=transfer.bandwidth / factor, latency=factor * transfer.latency)


def _alone(
    samples: Sequence[ProgramSample], numbers: np.ndarray, launch: float, most: int
) -> Points:
    """For each number of devices that worked alone, the share of the predicted seconds."""
    ratios: dict[int, list[float]] = {}
    for it in samples:
        if it.what == "module":
            predicted = _predicted(it, numbers, launch)
            ratios.setdefault(it.devices, []).append(it.seconds / predicted)
    if len(ratios) < 2:
        return ()
    every = log(geometric_mean(ratios[most]))
    shares = {
        number: min(float(np.exp(log(geometric_mean(found)) - every)), 1.0)
        for number, found in ratios.items()
    }
    return tuple((float(number), shares[number]) for number in sorted(shares))
