"""How a tensor crosses from one mesh to another: who sends which part of it to whom.

The paper's cross-mesh resharding (section 6), a many-to-many multicast of tiles (`tiles.py`).

**Methods**:

* ``send_recv``: each device of the destination receives its own tile, also where others want it.
* ``local_all_gather``: the tensor lands sharded over axes that the destination does not use, and
  each fragment that reads it gathers it over the destination's own links.
* ``local_reshard``: the tensor lands in other tiles, such as those that the source has, and each
  fragment that reads it reshards it inside the hosts.
* ``broadcast``: what a host lacks is received by one of its devices, which passes it on inside the
  host, 1, 2, 4 ... devices at a time.

**Lower bound.** If a destination host needs a piece that no source device on it holds, the piece
has to enter the host at least once, over a slow link. ``lower_bound`` adds these bytes up over the
hosts. ``broadcast`` reaches the bound. Of the methods that reach it, gathers included, the one with
the fewest seconds is taken. Slow links come first because all transfers of a pipeline share them,
while a fast link belongs to one device. (The original Alpa sends J times as much if a destination
tile has J sources.)

**Seconds**, in the alpha-beta model. A device sends its messages one after another: each costs its
link's latency, and all share the device's port at the fast link's bandwidth. All messages that
leave or enter a host share the bandwidth of its slow link. Latency and bandwidth are those that
transfers between meshes reach (``Link.between_meshes``). Ports work in parallel and in both
directions, so a step takes as long as its slowest port. Steps follow each other; gathers are rings,
as in ``cost/collectives.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

import numpy as np

from alpa.passes.cost.collectives import inside_host, ring_over_hosts
from alpa.passes.cost.device import Link
from alpa.passes.cost.reshard import Layout
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.transfers.messages import Messages, Method, deliver
from alpa.passes.solve.transfers.tiles import Crossing, Integers, TiledMesh


@dataclass(frozen=True, kw_only=True)
class Problem(Crossing):
    """A crossing whose layout on ``target`` is what is wanted; it may land in a finer one."""

    slow: Link
    """between hosts: per host and direction"""
    fast: Link
    """inside a host: per device and direction"""
    readers: int = 1
    """how many fragments read the tensor, each of which would gather for itself; 0 = none can
    gather, because it is needed as it lands"""
    landings: tuple[tuple[Layout, float], ...] = ()
    """layouts in which it may land besides, and the seconds in which a fragment reshards it from
    there; nothing of that crosses slow links"""

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        super().check()
        if self.readers < 0:
            raise ValueError(f"a tensor has no {self.readers} readers")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes over links between hosts and over links inside them, and the seconds they take."""

    slow_bytes: int = 0
    fast_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        """One after the other."""
        return Traffic(
            slow_bytes=self.slow_bytes + other.slow_bytes,
            fast_bytes=self.fast_bytes + other.fast_bytes,
            seconds=self.seconds + other.seconds,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """Each device of the destination gets each element of what lands there exactly once."""

    method: Method
    landing: Layout
    """the destination's layout after the transfers: the wanted one, or a finer one to gather"""
    steps: tuple[Messages, ...]
    """first from the source; then, in a broadcast, between devices of a host of the destination"""
    transfers: Traffic
    """of all steps"""
    gathers: Traffic
    """of the all-gathers in the fragments that read the tensor; of its resharding there the
    seconds alone"""

    @property
    def total(self) -> Traffic:
        return self.transfers + self.gathers


def solve(problem: Problem) -> Solution:
    """The transfers of least slow bytes, then of least seconds. Raises ``ValueError``."""
    problem.check()
    solution = min(
        (of_method(problem, method, landing) for method, landing in candidates(problem)),
        key=lambda found: (found.total.slow_bytes, found.total.seconds),
    )
    verify(problem, solution)
    return solution


def lower_bound(problem: Problem) -> int:
    """The bytes that have to cross slow links: what each destination host wants and lacks."""
    pieces = problem.pieces
    lacks = pieces.slow & (problem.groups.member[pieces.position] == 0)
    return int(problem.bytes_of(pieces.boxes[lacks]).sum())


def candidates(problem: Problem) -> list[tuple[Method, Layout]]:
    """The methods to compare, each with the layout in which the tensor lands."""
    wanted = problem.target.dims
    others = [landing for landing, _ in problem.landings] if problem.readers else []
    reshards: list[tuple[Method, Layout]] = [("local_reshard", landing) for landing in others]
    if not problem.target.free_axes:
        return [("send_recv", wanted), *reshards]
    return [
        ("send_recv", wanted),
        *reshards,
        *(("local_all_gather", landing) for landing in _landings(problem)),
        ("broadcast", wanted),
    ]


def _landings(problem: Problem) -> list[Layout]:
    """Finer layouts than the wanted one: unused axes also shard dimensions that divide evenly.

    Each candidate prefers one dimension for all axes and uses others only if that one does not
    divide evenly. The preferred dimension affects the number of pieces.
    """
    free, found = problem.target.free_axes, list[Layout]()
    # The axes of a host come last. Other subsets are not tried.
    for begin in range(len(free) if problem.readers else 0):
        for first in range(len(problem.shape)):
            landing = _spread(problem, free[begin:], first)
            if landing is not None and landing not in found:
                found.append(landing)
    return found


def _spread(problem: Problem, axes: tuple[int, ...], first: int) -> Layout | None:
    shape, sizes, dims = problem.shape, problem.target.sizes, list(problem.target.dims)
    order = sorted(range(len(shape)), key=lambda d: d != first)
    for axis in axes:
        for d in order:
            ways = sizes[axis] * prod(sizes[a] for a in dims[d])
            if shape[d] and shape[d] % ways == 0:
                dims[d] = (*dims[d], axis)
                break
        else:
            return None
    return tuple(dims)


def of_method(problem: Problem, method: Method, landing: Layout) -> Solution:
    """The transfers of one of the ``candidates``, with balanced senders."""
    landed = problem
    if landing != problem.target.dims:
        landed = replace(problem, target=replace(problem.target, dims=landing))
    steps = deliver(landed, method)
    if method == "local_reshard":
        gather = Traffic(seconds=dict(problem.landings)[landing])
    else:
        gather = _gather(problem, landed.target)
    return Solution(
        method=method,
        landing=landing,
        steps=steps,
        transfers=sum((_traffic(problem, step) for step in steps), Traffic()),
        gathers=sum([gather] * problem.readers, Traffic()),
    )


def _traffic(problem: Problem, step: Messages) -> Traffic:
    """Of transfers at the same time."""
    moves = step.sources != step.targets
    sizes = problem.bytes_of(step.boxes[moves])
    devices = step.sources[moves], step.targets[moves]
    hosts = tuple(problem.host_of[it] for it in devices)
    slow = hosts[0] != hosts[1]
    inside, between = problem.fast.between_meshes, problem.slow.between_meshes
    seconds = 0.0
    for ports, links in zip(devices, hosts, strict=True):  # out, and in
        length = len(problem.host_of)
        far, near = (np.bincount(ports[it], minlength=length) for it in (slow, ~slow))
        through = np.bincount(ports, sizes, length) / inside.bandwidth
        of_ports = far * between.latency + near * inside.latency + through
        of_hosts = np.bincount(links[slow], sizes[slow])
        of_hosts = between.latency + of_hosts[of_hosts > 0] / between.bandwidth
        seconds = max(seconds, of_ports.max(initial=0.0), of_hosts.max(initial=0.0))
    return Traffic(
        slow_bytes=int(sizes[slow].sum()),
        fast_bytes=int(sizes[~slow].sum()),
        seconds=float(seconds),
    )


def _gather(problem: Problem, landing: TiledMesh) -> Traffic:
    """Of the all-gathers from a landing layout to the wanted one, one per dimension.

    The partitioner is free to take the dimensions in any order: the worst one counts.
    """
    added = [
        (d, axes[len(wanted) :])
        for d, (axes, wanted) in enumerate(zip(landing.dims, problem.target.dims, strict=True))
        if axes != wanted
    ]
    local = prod(landing.tile_shape(problem.shape)) * problem.itemsize
    orders: list[Traffic] = []
    for order in permutations(added):
        held, total = local, Traffic()
        for _, axes in order:
            total += _ring(problem, landing, axes, held)
            held *= prod(landing.sizes[axis] for axis in axes)
        orders.append(total)
    return max(orders, key=lambda total: (total.slow_bytes, total.seconds))


def _ring(problem: Problem, mesh: TiledMesh, axes: tuple[int, ...], held: int) -> Traffic:
    """Of all-gathers over some axes at once, each device holding ``held`` bytes at the start.

    In a ring of n each device passes n - 1 parts on to the next one; the rings that leave or enter
    a host share its slow link.
    """
    size = prod(mesh.sizes[axis] for axis in axes)
    others = tuple(axis for axis in range(len(mesh.sizes)) if axis not in axes)
    order = np.lexsort((mesh.numbers(axes), mesh.numbers(others)))
    here = np.array(mesh.hosts)[order].reshape(-1, size)
    there = np.roll(here, -1, axis=1)
    crossings = int((here != there).sum())
    if crossings:
        shared = max(int(np.bincount(hosts[here != there]).max()) for hosts in (here, there))
        each = crossings / len(here)
        cost = ring_over_hosts(problem.fast, problem.slow, size, crossings=each, rings=shared)
    else:
        cost = inside_host("all-gather", problem.fast, size)
    return Traffic(
        slow_bytes=crossings * (size - 1) * held,
        fast_bytes=(len(mesh.devices) - crossings) * (size - 1) * held,
        seconds=cost.seconds(size * held),
    )


def verify(problem: Problem, solution: Solution) -> None:
    """Carries the transfers out on boxes.

    Raises ``VerificationError`` where a device cannot send what it shall, gets something twice or
    not at all, or the bytes are not those of ``solution``.
    """
    _verify_landing(problem, solution)
    _verify_senders(problem, solution)
    _verify_receivers(problem, solution)
    carried = sum((_traffic(problem, step) for step in solution.steps), Traffic())
    stated = solution.transfers
    if (carried.slow_bytes, carried.fast_bytes) != (stated.slow_bytes, stated.fast_bytes):
        raise VerificationError(
            f"{carried.slow_bytes} slow and {carried.fast_bytes} fast bytes are carried, "
            f"{stated.slow_bytes} and {stated.fast_bytes} are stated"
        )
    least = lower_bound(problem)
    if solution.total.slow_bytes != least:
        raise VerificationError(f"{solution.total.slow_bytes} slow bytes, {least} are enough")


def _verify_landing(problem: Problem, solution: Solution) -> None:
    wanted, landing = problem.target.dims, solution.landing
    if solution.method == "local_reshard" and problem.readers and landing in dict(problem.landings):
        return
    gathers = solution.method == "local_all_gather"
    finer = all(new[: len(old)] == old for old, new in zip(wanted, landing, strict=True))
    mesh = replace(problem.target, dims=landing)
    even = all(
        new == old or length % ways == 0
        for old, new, length, ways in zip(wanted, landing, problem.shape, mesh.ways, strict=True)
    )
    if gathers != (landing != wanted) or not (finer and even) or (gathers and not problem.readers):
        raise VerificationError(
            f"{solution.method} cannot land as {landing} where {wanted} is wanted"
        )


def _verify_senders(problem: Problem, solution: Solution) -> None:
    """Each device has what it sends: its tile at first, and later what it has got by then.

    Parts that overlap count twice here, but `_verify_receivers` lets no device get such ones.
    """
    devices = np.array(problem.source.devices)
    tiles = Messages(sources=devices, targets=devices, boxes=problem.source.boxes(problem.shape))
    for number, step in enumerate(solution.steps):
        has = _together(solution.steps[:number]) if number else tiles
        covered = _covered(problem, has, step)
        for row in np.flatnonzero(covered != problem.bytes_of(step.boxes))[:1]:
            message = f"{[*step][row]} in step {number}: the sender does not have it"
            raise VerificationError(message)


def _covered(problem: Problem, has: Messages, step: Messages) -> Integers:
    """Of each message, the bytes that its sender has: it is the target of parts in ``has``."""
    order = np.argsort(has.targets, kind="stable")
    targets, boxes = has.targets[order], has.boxes[order]
    first, last = (np.searchsorted(targets, step.sources, side) for side in ("left", "right"))
    if (last - first == 1).all():
        return problem.bytes_of(_overlap(boxes[first], step.boxes))
    parts = zip(first.tolist(), last.tolist(), step.boxes, strict=True)
    return np.array(
        [problem.bytes_of(_overlap(boxes[a:b], box)).sum() for a, b, box in parts], np.int64
    )


def _overlap(some: Integers, others: Integers) -> Integers:
    """[.., dimension, start or stop] of the overlaps of boxes."""
    start = np.maximum(some[..., 0], others[..., 0])
    stop = np.minimum(some[..., 1], others[..., 1])
    return np.stack([start, np.maximum(start, stop)], axis=-1)


def _together(steps: Sequence[Messages]) -> Messages:
    return Messages(
        sources=np.concatenate([step.sources for step in steps]),
        targets=np.concatenate([step.targets for step in steps]),
        boxes=np.concatenate([step.boxes for step in steps]),
    )


def _verify_receivers(problem: Problem, solution: Solution) -> None:
    """Each device gets each element of its tile once, and nothing else.

    The corners of boxes have signs: they are the differences, along all dimensions, of how many
    boxes an element is in. So boxes have each element of another one once if their corners are
    those of that one, apart from corners that cancel out, and only then.
    """
    landing = replace(problem.target, dims=solution.landing)
    devices = np.concatenate([*(step.targets for step in solution.steps), landing.devices])
    tiles = landing.boxes(problem.shape)
    boxes = np.concatenate([*(step.boxes for step in solution.steps), tiles])
    _, corners = np.unique(devices, return_inverse=True)
    corners = corners[:, None]
    signs = np.where(np.arange(len(boxes)) < len(boxes) - len(tiles), 1, -1)[:, None]
    for d in range(len(problem.shape)):
        start, stop = boxes[0, d]
        if start < stop and (boxes[:, d] == boxes[0, d]).all():
            continue  # Boxes do not differ along it, and corners would double for nothing.
        ends, along = np.unique(boxes[:, d], return_inverse=True)
        corners = (corners[:, :, None] * len(ends) + along.reshape(-1, 1, 2)).reshape(
            len(boxes), -1
        )
        signs = (signs[:, :, None] * np.array([1, -1])).reshape(len(boxes), -1)
    _, corners = np.unique(corners, return_inverse=True)
    left = np.bincount(corners.ravel(), signs.ravel())
    for row in np.flatnonzero(left[corners.reshape(signs.shape)].any(axis=1))[:1]:
        device = int(devices[row])
        got = [it.box for step in solution.steps for it in step if it.target == device]
        wanted = landing.tiles(problem.shape).get(device, "nothing")
        raise VerificationError(
            f"device {device} gets {got}, which is not each element of {wanted} once"
        )
