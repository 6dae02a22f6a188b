"""Stage candidates: what each interval of layers costs on a submesh in one logical shape.

Costs of sharded layers take seconds to find (`class_problem.py`), so there are also bounds of them
that cost nothing (`mesh_candidates.py` says how both are used).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from alpa.dialects.plan import Plan
from alpa.passes.cost.cluster import Cluster, Link
from alpa.passes.schedules.planned import hidden_share, in_flight
from alpa.passes.schedules.split_memory import Bytes, Count, CountsOfStages
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import Problem
from alpa.passes.stages.boundary import Boundary
from alpa.passes.stages.class_costs import ClassCosts
from alpa.passes.stages.class_problem import ClassSolver, Submesh
from alpa.passes.stages.intervals import intervals, largest, pairs_inside

PRICES = (0.3, 10.0)
"""Of memory: beside the fastest sharding, some that hold less (see `pareto.solve`). At 10, layers
hold as little as they can, unless links are slow. With 0.1 instead of 0.3, Wide-ResNet-13B's
predicted step on 64 V100s is 2 % longer; with 1, llama-8b's on 64 H100s is 0.2 % longer."""
LAST_PRICE = 1e3
"""It is asked where nothing else fits. Like the others, it is relative to the fastest sharding: on
links of 1 MB/s between devices of 1 TFLOP/s, it is too low to find what holds least."""
SHARES = (0.25, 0.5, 0.75)
"""Of a stage's layers, where some but not all are rematerialised."""
_LITTLE = 0.5
_NO_LIMIT = 1 << 30
"""More micro-batches in flight than any schedule has: memory is no limit."""
_BYTES = (
    "state_bytes",
    "transient_bytes",
    "activation_bytes",
    "exchanged_bytes",
    "freed_bytes",
    "made_bytes",
)
_COSTS = ("seconds", "forward", "second", "update", *_BYTES)


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """What each interval of layers costs on a submesh in a logical shape: arrays [K, K]."""

    submesh: Submesh
    seconds: np.ndarray
    """of a forward and a backward"""
    forward: np.ndarray
    """seconds of the forward"""
    second: np.ndarray
    """seconds of the second part of a split backward, unless it is the first stage"""
    update: np.ndarray
    state_bytes: np.ndarray
    """per device, all the time"""
    transient_bytes: np.ndarray
    """per device, the most that is needed at any time beside the other three"""
    activation_bytes: np.ndarray
    """per device and micro-batch in flight"""
    exchanged_bytes: np.ndarray
    """per device, of what goes to other stages and comes from them"""
    freed_bytes: np.ndarray
    """of the activations, those that the first part of a split backward alone reads; in the first
    stage, all of the backward is the second part"""
    made_bytes: np.ndarray
    """per device and micro-batch, what the first part makes for the second, unless it is the first
    stage"""
    remat: float = 0.0
    """the share of a stage's layers, from its first on, that are rematerialised"""
    is_bound: bool = False
    """the costs are lower bounds"""
    problem: str = ""
    """why there is no plan on the submesh, if there is none; then the seconds are infinite"""

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.submesh[0] * self.submesh[1]

    @property
    def fixed_bytes(self) -> np.ndarray:
        """Bytes per device that do not depend on what is in flight."""
        return self.state_bytes + self.transient_bytes + self.exchanged_bytes

    def max_in_flight(self, memory: float, counts: CountsOfStages | None = None) -> np.ndarray:
        """How many micro-batches fit; 0 where none does.

        Args:
            memory: of a device.
            counts: what a stage may hold, if the schedule splits backwards.
        """
        if counts is not None:
            return self._fitting_split(memory, counts)
        free = memory - self.fixed_bytes
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = np.where(
                self.activation_bytes > 0, free // self.activation_bytes, float(_NO_LIMIT)
            )
        return np.where(free > 0, np.clip(fits, 0, _NO_LIMIT), 0).astype(np.int64)

    def _fitting_split(self, memory: float, counts: CountsOfStages) -> np.ndarray:
        bytes_of, need = self.split_bytes, np.zeros(self.seconds.shape)
        # One at a time may fit where as many as the schedule keeps do not.
        fits = (self.fixed_bytes + bytes_of.held(Count(1, 1, 1)) < memory).astype(np.int64)
        for number, most in counts:
            for count in most:
                need = np.maximum(need, bytes_of.held(count))
            fits[self.fixed_bytes + need < memory] = number
        return fits

    @property
    def split_bytes(self) -> Bytes:
        """What a stage holds for one micro-batch if its backward is split."""
        freed, made = self.freed_bytes.copy(), self.made_bytes.copy()
        freed[0], made[0] = 0.0, 0.0
        return Bytes(freed=freed, read=self.activation_bytes - freed, made=made)

    def seconds_of(self, first: int, last: int) -> tuple[float, float, float]:
        """Of the forward and of both parts of the backward of a stage."""
        whole, forward = self.seconds[first, last], self.forward[first, last]
        backward = max(float(whole - forward), 0.0)
        # What hands no gradients to a stage before it has no first part.
        second = min(float(self.second[first, last]), backward) if first else backward
        return float(whole) - backward, backward - second, second

    def is_small(self, memory: float, plan: Plan) -> bool:
        """Whether every interval takes at most `_LITTLE` of the memory, with as many micro-batches
        in flight as it may have before the layers behind it. Others that hold less are of no use
        then, whatever the reserve."""
        count = len(self.seconds)
        behind = [in_flight(plan.schedule, plan.num_micro_batches, count - j) for j in range(count)]
        held = self.fixed_bytes + self.activation_bytes * np.array(behind)
        return bool((held[np.triu_indices(count)] <= _LITTLE * memory).all())

    def rematerialised(self, first: int, last: int) -> range:
        """The layers of a stage that are rematerialised."""
        return range(first, first + ceil(self.remat * (last + 1 - first)))


def candidate_of(solver: ClassSolver, costs: ClassCosts, submesh: Submesh) -> Candidate:
    """The costs of intervals of layers, from those of their classes."""
    classes = solver.classes
    by_layer = costs.by_class[:, classes.class_of]
    forward, backward, update, state, activation, transient, freed, made, second = by_layer
    count = len(classes.class_of)
    below = np.tril(np.full((count, count), np.inf), -1)
    between = {"forward": np.zeros((count, count)), "update": np.zeros((count, count))}
    for link, pairs in classes.links.items():
        kind = "update" if link.part == "update" else "forward"
        # A gradient is summed up where it is made, also for readers on other meshes.
        stays = link.result in classes.classes[link.producer].totals
        for producer, reader in pairs:
            ends = (producer, producer) if stays else (producer, reader)
            between[kind][min(ends), max(ends)] += costs.links[link]
    exchanged = np.zeros((count, count))
    for end, number in solver.exchanged.items():
        exchanged += costs.exchanged[end] * number
    seconds = intervals(forward + backward) + pairs_inside(between["forward"])
    call, called = solver.cluster.device.call, solver.call_arguments[:, classes.class_of]
    starts = call.start * (called.max(axis=1) > 0)
    calls = [intervals(call.seconds(each, submesh[1]) - call.start) for each in called]
    return Candidate(
        submesh=submesh,
        seconds=seconds + calls[0] + calls[1] + starts[:2].sum() + below,
        forward=intervals(forward),
        second=intervals(second),
        update=intervals(update) + pairs_inside(between["update"]) + calls[2] + starts[2] + below,
        state_bytes=intervals(state),
        transient_bytes=largest(transient),
        activation_bytes=intervals(activation),
        exchanged_bytes=exchanged,
        freed_bytes=intervals(freed),
        made_bytes=intervals(made),
    )


def remat_bounds(
    fastest: Candidate,
    one_device: Candidate,
    again: Candidate | None = None,
    least: np.ndarray | None = None,
) -> list[Candidate]:
    """Bounds of candidates that rematerialise all of a stage's layers, or some.

    They compute and send all that the fastest candidate does, and an even split of what one device
    computes again. They hold an even split of what one device holds. Both come from `again`, one
    device with all layers rematerialised. Without it, only the bytes of the state are counted.

    `least`, [K, K], are seconds that intervals of rematerialised layers take at least.
    """
    if again is None:
        nothing = np.zeros_like(one_device.seconds)
        bound = _even_bytes(fastest, one_device)
        passing = ("transient_bytes", "activation_bytes", "freed_bytes", "made_bytes")
        return [replace(bound, **dict.fromkeys(passing, nothing), remat=1.0)]
    with np.errstate(invalid="ignore"):  # inf - inf below the diagonal
        more = np.nan_to_num((again.seconds - one_device.seconds).clip(min=0.0)) / fastest.size
    whole = replace(_even_bytes(fastest, again), seconds=fastest.seconds + more, remat=1.0)
    bounds = with_shares([_even_bytes(fastest, one_device)], [whole])
    if least is None:
        return bounds
    with np.errstate(invalid="ignore"):
        more = np.nan_to_num((least - whole.seconds).clip(min=0.0), posinf=0.0)
    return [_raised(bound, more) for bound in bounds]


def _raised(bound: Candidate, more: np.ndarray) -> Candidate:
    """A bound with more seconds, [K, K], for its rematerialised layers."""
    count = len(more)
    seconds = bound.seconds.copy()
    for i in range(count):
        for j in range(i, count):
            seconds[i, j] += more[i, bound.rematerialised(i, j)[-1]]
    return replace(bound, seconds=seconds)


def _even_bytes(candidate: Candidate, one_device: Candidate) -> Candidate:
    """The seconds of a candidate, with the bytes of one device split evenly."""
    even = {name: getattr(one_device, name) / candidate.size for name in _BYTES}
    return replace(candidate, **even, is_bound=True)


def with_shares(candidates: Sequence[Candidate], remat: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that rematerialise every layer, and for each, some that do so for the first ones.

    `candidates` are those of the same mesh and prices without rematerialisation. The first layers
    are taken because their backward parts run last: what they compute again takes the place of
    what the others kept.
    """
    pairs = [
        pair for pair in zip(candidates, remat, strict=False) if not any(o.problem for o in pair)
    ]
    return [*(_mixed(*pair, share) for pair in pairs for share in SHARES), *remat]


def _mixed(without: Candidate, whole: Candidate, share: float) -> Candidate:
    """The first layers of each interval as in `whole`, the others as in `without`.

    What crosses between the two takes as long as in the slower of both.
    """
    count = len(whole.seconds)
    first, last = np.triu_indices(count)
    seam = first + np.ceil(share * (last + 1 - first)).astype(int)
    inside = seam <= last
    i, k, j = first[inside], seam[inside], last[inside]

    def mixed(name: str) -> np.ndarray:
        a, b = getattr(whole, name), getattr(without, name)
        found = a.copy()
        if name == "transient_bytes":
            found[i, j] = np.maximum(a[i, k - 1], b[k, j])
        elif name == "exchanged_bytes":
            found[i, j] = np.maximum(a, b)[i, j]
        else:
            crossing = [x[i, j] - x[i, k - 1] - x[k, j] for x in (a, b)]
            found[i, j] = a[i, k - 1] + b[k, j] + np.maximum(*crossing)
        return found

    return replace(whole, **{name: mixed(name) for name in _COSTS}, remat=share)


def stage_problem(
    candidates: Sequence[Candidate],
    kind_of: Sequence[int],
    boundary: Boundary,
    kinds: Sequence[Cluster],
    others: Sequence[Link | None],
    plan: Plan,
    counts: CountsOfStages | None = None,
) -> Problem:
    """The stage DP's problem; its submeshes are the candidates in their order, its groups the kinds
    of hosts in theirs.

    Args:
        candidates: of all kinds.
        kind_of: the kind of hosts of each candidate.
        boundary: what crosses between stages.
        kinds: the hosts.
        others: of each kind, the slowest link to hosts of another one.
        plan: the micro-batches and the schedule.
        counts: what a stage may hold, if the schedule splits backwards.
    """
    submeshes = [o.submesh[:2] for o in candidates]
    its = [
        (kinds[kind], *submesh, others[kind])
        for kind, submesh in zip(kind_of, submeshes, strict=True)
    ]
    into, back = np.stack([boundary.seconds(*each) for each in its], axis=2)
    once = [boundary.once_seconds(*each) for each in its]
    overlaps = [boundary.overlaps(kinds[kind], others[kind]) for kind in kind_of]
    hidden = np.array([[hidden_share(plan.schedule, it) for it in each] for each in overlaps])
    fits = [
        o.max_in_flight(kinds[kind].device.memory, counts)
        for o, kind in zip(candidates, kind_of, strict=True)
    ]
    return Problem(
        groups=tuple(
            Group(number, kind.hosts, kind.devices_per_host) for number, kind in enumerate(kinds)
        ),
        submeshes=tuple(submeshes),
        kind_of=tuple(kind_of),
        t=np.stack([o.seconds for o in candidates], axis=2),
        u=np.stack([o.update + more for o, more in zip(candidates, once, strict=True)], axis=2),
        max_in_flight=np.stack(fits, axis=2),
        c=into,
        back=np.append(back[1:], np.zeros_like(back[:1]), axis=0),
        hidden=hidden if hidden.any() else None,
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
    )
