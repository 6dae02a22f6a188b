"""What a submesh offers the stage DP: its logical views, each at several prices of memory.

Costs of sharded layers take seconds to find (`class_costs.py`), so there are also bounds of them
that cost nothing (`search.py` says what for).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np

from alpa.dialects.attributes import Plan
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.solve.shard_problem import InfeasibleError, SolverFailedError
from alpa.passes.stages.class_costs import ClassCosts, ClassSolver
from alpa.passes.stages.cost import Boundary, intervals, pairs_inside
from alpa.passes.stages.layer_classes import LayerClasses

if TYPE_CHECKING:
    from alpa.passes.solve import stage_dp

PRICES = (0.0, 1.0, 100.0)
"""Of memory: the fastest sharding, and ones that hold less and less (see `ClassSolver.solve`)."""
SHARES = (0.25, 0.5, 0.75)
"""Of a stage's layers that are rematerialised, where not all or none are."""
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
    state_bytes: np.ndarray
    """per device, all the time"""
    transient_bytes: np.ndarray
    """per device, the most that is needed besides at any time"""
    activation_bytes: np.ndarray
    """per device and micro-batch in flight"""
    remat: float = 0.0
    """the share of a stage's layers, from its first on, that are rematerialised"""
    problem: str = ""
    """why there is no plan on it, where there is none: it takes for ever"""

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.hosts * self.devices

    @property
    def fixed_bytes(self) -> np.ndarray:
        """Per device, whatever is in flight."""
        return self.state_bytes + self.transient_bytes

    def max_in_flight(self, memory: float) -> np.ndarray:
        """How many micro-batches fit, 0 where not even the states do."""
        free = memory - self.fixed_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                self.activation_bytes > 0, free // self.activation_bytes, float(_NO_LIMIT)
            )
        return np.where(free > 0, np.clip(fits, 0, _NO_LIMIT), 0).astype(np.int64)

    def rematerialised(self, first: int, last: int) -> range:
        """The layers of a stage that are."""
        return range(first, first + ceil(self.remat * (last + 1 - first)))


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
        state_bytes=one_device.state_bytes / count,
        transient_bytes=one_device.transient_bytes / count,
        activation_bytes=one_device.activation_bytes / count,
    )


def remat_bounds(
    options: Sequence[Option], one_device: Option, again: Option | None = None
) -> list[Option]:
    """What rematerialised layers do not undercut on a submesh, for each of its views.

    They take the time of the fastest option, since they compute and send all that it does; only a
    sharding that a stage had no memory for is faster. And they hold an even split of what one
    device holds: `again` where all its layers are rematerialised, if that is known, else its state
    at least.
    """
    fastest: dict[tuple[int, ...] | None, Option] = {}
    for option in options:
        if not option.remat:
            fastest.setdefault(option.shape, option)
    nothing = np.zeros_like(one_device.seconds)
    return [
        replace(
            option,
            shape=None,
            state_bytes=one_device.state_bytes / option.size,
            transient_bytes=nothing if again is None else again.transient_bytes / option.size,
            activation_bytes=nothing if again is None else again.activation_bytes / option.size,
            remat=1.0,
        )
        for option in fastest.values()
    ]


def with_shares(options: Sequence[Option], remat: Sequence[Option]) -> list[Option]:
    """Options that rematerialise every layer, and for each those that do so with the first ones.

    `options` are the same views and prices without. The first layers, because their backward parts
    run last: what they compute again has the place of what the others kept.
    """
    pairs = [
        (without, whole)
        for shape in dict.fromkeys(whole.shape for whole in remat)
        for without, whole in zip(
            (o for o in options if o.shape == shape and not o.problem),
            (o for o in remat if o.shape == shape and not o.problem),
            strict=False,
        )
    ]
    mixed = [_mixed(*pair, share) for pair in pairs for share in SHARES]
    return [*mixed, *remat]


def _mixed(without: Option, whole: Option, share: float) -> Option:
    """The first layers of each interval as in `whole`, the others as in `without`.

    What crosses between the two takes as long as in the option where it takes longer.
    """
    count = len(whole.seconds)
    first, last = np.triu_indices(count)
    seam = first + np.ceil(share * (last + 1 - first)).astype(int)
    inside = seam <= last
    i, k, j = first[inside], seam[inside], last[inside]

    def put(array: np.ndarray, mixed: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[i, j] = mixed
        return array

    def sum_of(name: str) -> np.ndarray:
        a, b = getattr(whole, name), getattr(without, name)
        crossing = [x[i, j] - x[i, k - 1] - x[k, j] for x in (a, b)]
        return put(a, a[i, k - 1] + b[k, j] + np.maximum(*crossing))

    a, b = whole.transient_bytes, without.transient_bytes
    return replace(
        whole,
        seconds=sum_of("seconds"),
        update=sum_of("update"),
        state_bytes=sum_of("state_bytes"),
        transient_bytes=put(a, np.maximum(a[i, k - 1], b[k, j])),
        activation_bytes=sum_of("activation_bytes"),
        remat=share,
    )


def costed(
    solver: ClassSolver,
    hosts: int,
    devices: int,
    shapes: Sequence[tuple[int, ...]],
    remat: float = 0.0,
) -> list[Option]:
    """The options of a submesh, the fastest sharding of each view before others.

    A view that cannot be planned takes for ever. `remat` is the share of layers that the solver's
    programs rematerialise.

    Raises:
        PassError, InfeasibleError, TimeoutError, SolverFailedError: one device cannot be planned.
    """
    return begin_costing(solver, hosts, devices, shapes, remat)()


def begin_costing(
    solver: ClassSolver,
    hosts: int,
    devices: int,
    shapes: Sequence[tuple[int, ...]],
    remat: float = 0.0,
) -> Callable[[], list[Option]]:
    """As `costed`; the problems are posed, and what is returned waits for their solutions."""
    prices = PRICES if hosts * devices > 1 else PRICES[:1]
    # Each view is posed while those before it are being solved.
    posed = [solver.begin(hosts, devices, shape, prices) for shape in shapes]
    return partial(_finish_costing, solver.classes, hosts, devices, shapes, remat, posed)


def _finish_costing(
    classes: LayerClasses,
    hosts: int,
    devices: int,
    shapes: Sequence[tuple[int, ...]],
    remat: float,
    posed: Sequence[Callable[[], list[ClassCosts]]],
) -> list[Option]:
    options: list[Option] = []
    for shape, solution in zip(shapes, posed, strict=True):
        try:
            found = solution()
        except (PassError, InfeasibleError, TimeoutError, SolverFailedError) as error:
            if hosts * devices == 1:
                raise  # no submesh does better
            options.append(_impossible(classes, hosts, devices, shape, str(error)))
        else:
            options += [_option(classes, one, hosts, devices, shape) for one in found]
    return [replace(option, remat=remat) for option in options]


def stage_problem(
    options: Sequence[Option],
    boundary: Boundary,
    cluster: Cluster,
    plan: Plan,
    *,
    num_stages: int | None = None,
    minimise: Literal["step", "throughput"] = "step",
) -> stage_dp.Problem:
    """The stage DP's problem of choosing among options, whose numbers are its submeshes'."""
    from alpa.passes.solve import stage_dp  # noqa: PLC0415 - costs start-up time

    memory = cluster.device.memory
    submeshes = [(o.hosts, o.devices) for o in options]
    once = [boundary.once_seconds(cluster, *submesh) for submesh in submeshes]
    return stage_dp.Problem(
        hosts=cluster.hosts,
        devices_per_host=cluster.devices_per_host,
        submeshes=tuple(submeshes),
        t=np.stack([o.seconds for o in options], axis=2),
        u=np.stack([o.update + more for o, more in zip(options, once, strict=True)], axis=2),
        max_in_flight=np.stack([o.max_in_flight(memory) for o in options], axis=2),
        c=np.stack([boundary.seconds(cluster, *submesh) for submesh in submeshes], axis=1),
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        num_stages=num_stages,
        minimise=minimise,
    )


def _impossible(
    classes: LayerClasses, hosts: int, devices: int, shape: tuple[int, ...], problem: str
) -> Option:
    count = len(classes.class_of)
    never, nothing = np.full((count, count), np.inf), np.zeros((count, count))
    return Option(
        hosts=hosts,
        devices=devices,
        shape=shape,
        seconds=never,
        update=never,
        state_bytes=nothing,
        transient_bytes=nothing,
        activation_bytes=nothing,
        problem=problem,
    )


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
        state_bytes=intervals(costs.state[at]),
        transient_bytes=_largest(costs.transient[at]),
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
