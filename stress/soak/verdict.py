"""Decides whether the resources of a run grow.

**Before the verdict**, the first half of the samples is left out: compilation, caches and
allocators that fill up are not leaks. The rest is one series of values over time for each measured
quantity.

**A series grows** if two conditions hold. First, the Theil-Sen line through the second half, whose
slope is the median of the slopes between all pairs of samples, rises

* in bytes: by at least 1 MiB in that time, and by more than 2 % of its median per hour;
* in numbers of files, sockets, threads: by at least one in that time.

Second, it rises all the time: the median of each third of the second half is above that of the
previous third by at least a third of that rise. Single outliers change neither slope nor medians.
One jump, such as a table that doubles or a pool with one more thread, leaves two of the three
thirds equal. A leak in many steps is detected.

**Steps** become slower if those of the old run take longer than those of a fresh one beside it, in
the median of all rounds, by more than a limit (10 % by default). The same applies to the processor
time of all processes per step, with saving and evaluation.

With fewer than ten samples in a half, or five rounds, there is no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_high, median_low
from typing import Literal

import numpy as np

from stress.soak.samples import Sample
from stress.soak.turns import Round

Unit = Literal["bytes", "count", "seconds"]

FEWEST = 10  # samples in a half, for a verdict
FEWEST_ROUNDS = 5
RISE = {"bytes": 1 << 20, "count": 1.0}  # the least in the second half
SHARE_PER_HOUR = 0.02  # of the median, for bytes
_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one series; `grows` is None if it is too short.

    `begin` and `end` are the medians of the first and the last third of its second half; for
    seconds, those of the fresh run and of the old one. `per_hour` and `per_step` are the slope, in
    units.
    """

    name: str
    unit: Unit
    begin: float
    end: float
    per_hour: float
    per_step: float
    grows: bool | None


def verdicts(samples: Sequence[Sample]) -> list[Verdict]:
    """Judges all quantities that were measured before the fresh run started."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return []
    hours = np.array([sample.seconds for sample in half]) / _HOUR
    steps = np.array([sample.steps for sample in half], np.float64)
    return [
        judge(name, unit, hours, steps, np.array(values))
        for (name, unit), values in series(half).items()
    ]


def series(samples: Sequence[Sample]) -> Mapping[tuple[str, Unit], list[float]]:
    """The values that may grow, by name and unit, of processes that live to the end."""
    found: dict[tuple[str, Unit], list[float]] = {}
    for process in samples[-1].processes:
        usages = [sample.processes[process] for sample in samples if process in sample.processes]
        if len(usages) < len(samples):
            continue
        found[f"{process}: own memory", "bytes"] = [it.own_bytes for it in usages]
        found[f"{process}: open files", "count"] = [it.open_files for it in usages]
        found[f"{process}: sockets", "count"] = [it.sockets for it in usages]
        found[f"{process}: threads", "count"] = [it.threads for it in usages]
    if samples[-1].object_store_bytes is not None:
        found["object store", "bytes"] = [sample.object_store_bytes or 0 for sample in samples]
    found["files of checkpoints", "count"] = [sample.checkpoint_files for sample in samples]
    return found


def judge(
    name: str,
    unit: Unit,
    hours: np.ndarray,
    steps: np.ndarray,
    values: np.ndarray,
) -> Verdict:
    """One series: [n] times in hours, [n] numbers of steps, [n] values."""
    thirds = [third.tolist() for third in np.array_split(values, min(3, len(values)))]
    per_hour = theil_sen(hours, values)
    rise = per_hour * float(hours[-1] - hours[0])
    # A jump in the very middle of a third has half of it on either side.
    rises = [median_low(late) - median_high(early) for early, late in pairwise(thirds)]
    always = all(step >= RISE[unit] / 3 for step in rises)
    grows: bool | None = rise >= RISE[unit] and always
    if unit == "bytes":
        grows = grows and per_hour > SHARE_PER_HOUR * float(np.median(values))
    return Verdict(
        name=name,
        unit=unit,
        begin=median(thirds[0]),
        end=median(thirds[-1]),
        per_hour=per_hour,
        per_step=theil_sen(steps, values),
        grows=None if len(values) < FEWEST else grows,
    )


def judge_rounds(rounds: Sequence[Round], slower: float) -> list[Verdict]:
    """Compares the steps of an old run with those of a fresh one; empty without rounds.

    `slower` is the share by which they may take longer.
    """
    if not rounds:
        return []
    fresh, old = [it.fresh for it in rounds], [it.old for it in rounds]
    return [
        _slower(name, [of(it) for it in fresh], [of(it) for it in old], slower)
        for name, of in (
            ("step, fresh and old", lambda turn: turn.step_seconds),
            ("processor time per step, fresh and old", lambda turn: turn.processor_seconds),
        )
    ]


def _slower(name: str, fresh: Sequence[float], old: Sequence[float], limit: float) -> Verdict:
    ratios = [late / early for early, late in zip(fresh, old, strict=True)]
    return Verdict(
        name=name,
        unit="seconds",
        begin=median(fresh),
        end=median(old),
        per_hour=0.0,
        per_step=0.0,
        grows=None if len(ratios) < FEWEST_ROUNDS else median(ratios) > 1 + limit,
    )


def theil_sen(x: np.ndarray, y: np.ndarray) -> float:
    """The median of the slopes between all pairs of points of different x; 0 if there is none.

    [n] each, x in ascending order.
    """
    dx, dy = x[None, :] - x[:, None], y[None, :] - y[:, None]
    later = dx > 0
    return float(np.median(dy[later] / dx[later])) if later.any() else 0.0
