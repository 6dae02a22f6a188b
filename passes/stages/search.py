"""Which layers go on which meshes: the stage DP over costs of sharded stages, found as needed.

A submesh offers the DP `Option`s: its logical views, each at several prices of memory
(`class_costs.py`). Solving for them takes seconds, so a submesh is at first assumed to split all
work and memory evenly and to send nothing: no sharding does better. The DP is solved, the submeshes
that its cut uses are costed, and so on until a cut uses none that is not: then no other is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa.passes.stages.class_costs import ClassCosts, ClassSolver
from alpa.passes.stages.cost import intervals, pairs_inside
from alpa.passes.stages.layer_classes import LayerClasses

PRICES = (0.0, 1.0, 100.0)
"""Of memory: the fastest sharding, and ones that hold less and less (see `ClassSolver.solve`)."""
_NO_LIMIT = 1 << 30
"""More micro-batches in flight than any schedule has: memory is no limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A submesh, how it is seen, and what each interval of layers costs there: arrays [K, K]."""

    hosts: int
    devices: int
    shape: tuple[int, ...] | None
    """None while its costs are not known, only bounded from below"""
    seconds: np.ndarray
    update: np.ndarray
    fixed_bytes: np.ndarray
    """per device, whatever is in flight"""
    activation_bytes: np.ndarray
    """per device and micro-batch in flight"""

    def max_in_flight(self, memory: float) -> np.ndarray:
        """How many micro-batches fit, 0 where not even the states do."""
        free = memory - self.fixed_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                self.activation_bytes > 0, free // self.activation_bytes, float(_NO_LIMIT)
            )
        return np.where(free > 0, np.clip(fits, 0, _NO_LIMIT), 0).astype(np.int64)


def views(hosts: int, devices: int, rank: int, *, ordered: bool = False) -> list[tuple[int, ...]]:
    """The logical shapes of a submesh: of one axis, or all factorings in two that differ.

    Inside a host all links are equal, so that only the sizes count; over hosts the last axis has
    neighbours. `ordered`: the axes mean different things, so that (a, b) and (b, a) differ and an
    axis of size 1 is a choice, too.
    """
    count = hosts * devices
    if ordered:
        return [(count // a, a) for a in range(devices, 0, -1) if devices % a == 0]
    if hosts == 1:
        if rank == 1 or count < 4:
            return [(count,)]
        return [(a, count // a) for a in range(2, count) if count % a == 0 and a * a <= count] or [
            (count,)
        ]
    return [(hosts * devices // a, a) for a in range(devices, 1, -1) if devices % a == 0] or [
        (hosts, devices)
    ]


def bounded(one_device: Option, hosts: int, devices: int) -> Option:
    """What no sharding undercuts: one device's work and memory split evenly, and nothing sent."""
    count = hosts * devices
    return Option(
        hosts=hosts,
        devices=devices,
        shape=None,
        seconds=one_device.seconds / count,
        update=one_device.update / count,
        fixed_bytes=one_device.fixed_bytes / count,
        activation_bytes=one_device.activation_bytes / count,
    )


def costed(
    solver: ClassSolver, hosts: int, devices: int, shapes: Sequence[tuple[int, ...]]
) -> list[Option]:
    """The options of a submesh."""
    prices = PRICES if hosts * devices > 1 else PRICES[:1]
    return [
        _option(solver.classes, found, hosts, devices, shape)
        for shape in shapes
        for found in solver.solve(hosts, devices, shape, prices)
    ]


def _option(
    classes: LayerClasses, costs: ClassCosts, hosts: int, devices: int, shape: tuple[int, ...]
) -> Option:
    at = np.array(classes.class_of)
    count = len(at)
    valid = np.triu(np.ones((count, count), dtype=bool))
    between = {"forward": np.zeros((count, count)), "update": np.zeros((count, count))}
    for link, pairs in classes.links.items():
        kind = "update" if link.part == "update" else "forward"
        for producer, reader in pairs:
            low, high = min(producer, reader), max(producer, reader)
            between[kind][low, high] += costs.links[link]
    seconds = intervals((costs.forward + costs.backward)[at]) + pairs_inside(between["forward"])
    update = intervals(costs.update[at]) + pairs_inside(between["update"])
    return Option(
        hosts=hosts,
        devices=devices,
        shape=shape,
        seconds=np.where(valid, seconds, np.inf),
        update=np.where(valid, update, np.inf),
        fixed_bytes=intervals(costs.state[at]) + _largest(costs.transient[at]),
        activation_bytes=intervals(costs.activation[at]),
    )


def _largest(values: np.ndarray) -> np.ndarray:
    """``[i, j]``: the largest of values i to j."""
    return np.array(
        [
            np.concatenate([np.zeros(i), np.maximum.accumulate(values[i:])])
            for i in range(len(values))
        ]
    )
