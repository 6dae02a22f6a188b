"""How a tensor crosses from one mesh to another: who sends which part of it to whom.

The paper's cross-mesh resharding (section 6), a many-to-many multicast of tiles (`tiles.py`).

**Methods**, where several devices of the destination want the same tile:

* ``send_recv``: each of them receives its own copy.
* ``local_all_gather``: the tensor lands sharded over axes that the destination does not use, and
  each fragment that reads it gathers it over the destination's own links.
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

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
from math import prod

from alpa.passes.cost.collectives import inside_host, ring_over_hosts
from alpa.passes.cost.device import Link
from alpa.passes.cost.reshard import Layout
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.transfers.senders import Box
from alpa.passes.solve.transfers.tiles import (
    Crossing,
    Message,
    Method,
    Pieces,
    TiledMesh,
    deliver,
    tile_number,
)


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


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Each device of the destination gets each element of what lands there exactly once."""

    method: Method
    landing: Layout
    """the destination's layout after the transfers: the wanted one, or a finer one to gather"""
    steps: tuple[tuple[Message, ...], ...]
    """first from the source; then, in a broadcast, between devices of a host of the destination"""
    transfers: Traffic
    """of all steps"""
    gathers: Traffic
    """of the all-gathers in the fragments that read the tensor"""

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
    pieces = Pieces.of(problem)
    wanted = {*zip(problem.target.indices, problem.target.hosts, strict=True)}
    return sum(
        problem.bytes_of(box)
        for index, host in wanted
        for held, box in pieces.boxes(index)
        if not pieces.holders_on(held, host)
    )


def candidates(problem: Problem) -> list[tuple[Method, Layout]]:
    """The methods to compare, each with the layout in which the tensor lands."""
    wanted = problem.target.dims
    if not problem.target.free_axes:
        return [("send_recv", wanted)]
    return [
        ("send_recv", wanted),
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
    target = replace(problem.target, dims=landing)
    steps = deliver(replace(problem, target=target), method)
    gather = _gather(problem, target)
    return Solution(
        method=method,
        landing=landing,
        steps=steps,
        transfers=sum((_traffic(problem, step) for step in steps), Traffic()),
        gathers=sum([gather] * problem.readers, Traffic()),
    )


def _traffic(problem: Problem, step: Sequence[Message]) -> Traffic:
    """Of transfers at the same time."""
    hosts = problem.hosts
    inside, between = problem.fast.between_meshes, problem.slow.between_meshes
    total: Counter[bool] = Counter()
    of_devices: Counter[tuple[str, int]] = Counter()
    of_hosts: Counter[tuple[str, int]] = Counter()
    messages: Counter[tuple[str, int, bool]] = Counter()
    for transfer in step:
        if transfer.source == transfer.target:
            continue
        size = problem.bytes_of(transfer.box)
        slow = hosts[transfer.source] != hosts[transfer.target]
        total[slow] += size
        for way, device in (("out", transfer.source), ("in", transfer.target)):
            messages[way, device, slow] += 1
            of_devices[way, device] += size
            if slow:
                of_hosts[way, hosts[device]] += size
    return Traffic(
        slow_bytes=total[True],
        fast_bytes=total[False],
        seconds=max(
            (
                *(
                    messages[way, device, True] * between.latency
                    + messages[way, device, False] * inside.latency
                    + size / inside.bandwidth
                    for (way, device), size in of_devices.items()
                ),
                *(between.latency + size / between.bandwidth for size in of_hosts.values()),
            ),
            default=0.0,
        ),
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
    rings: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for host, at in zip(mesh.hosts, mesh.coordinates, strict=True):
        ring = tuple(c for axis, c in enumerate(at) if axis not in axes)
        rings[ring].append((tile_number(at, mesh.sizes, axes), host))
    leaving: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    for ring in rings.values():
        hosts = [host for _, host in sorted(ring)]
        for here, there in zip(hosts, (*hosts[1:], hosts[0]), strict=True):
            if here != there:
                leaving[here] += 1
                entering[there] += 1
    crossings = leaving.total()
    if crossings:
        shared = max(*leaving.values(), *entering.values())
        each = crossings / len(rings)
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
    landing = replace(problem.target, dims=solution.landing)
    _verify_landing(problem, solution)
    held = problem.source.tiles(problem.shape)
    wanted = landing.tiles(problem.shape)
    got: dict[int, list[Box]] = defaultdict(list)
    hosts, carried = problem.hosts, Counter[bool]()
    for number, step in enumerate(solution.steps):
        for transfer in step:
            parts = [held[transfer.source]] if number == 0 else got[transfer.source]
            size = problem.bytes_of(transfer.box)
            if not any(_holds(part, transfer.box) for part in parts):
                covered = sum(problem.bytes_of(_overlap(part, transfer.box)) for part in parts)
                if covered != size:
                    message = f"{transfer} in step {number}: the sender does not have it"
                    raise VerificationError(message)
            if transfer.source != transfer.target:
                carried[hosts[transfer.source] != hosts[transfer.target]] += size
        for transfer in step:
            got[transfer.target].append(transfer.box)
    for device, box in wanted.items():
        if _corners(got[device]) != _corners([box]):
            raise VerificationError(
                f"device {device} gets {got[device]}, which is not each element of {box} once"
            )
    stated = solution.transfers
    if (carried[True], carried[False]) != (stated.slow_bytes, stated.fast_bytes):
        raise VerificationError(
            f"{carried[True]} slow and {carried[False]} fast bytes are carried, "
            f"{stated.slow_bytes} and {stated.fast_bytes} are stated"
        )
    least = lower_bound(problem)
    if solution.total.slow_bytes != least:
        raise VerificationError(f"{solution.total.slow_bytes} slow bytes, {least} are enough")


def _verify_landing(problem: Problem, solution: Solution) -> None:
    wanted, landing = problem.target.dims, solution.landing
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


def _holds(one: Box, other: Box) -> bool:
    """Whether a box has all elements of another one."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(one, other, strict=True))


def _overlap(one: Box, other: Box) -> Box:
    return tuple(
        (max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True)
    )


def _corners(boxes: Iterable[Box]) -> dict[tuple[int, ...], int]:
    """The corners of boxes with signs, as far as they do not cancel out.

    They are those of one box if the others together have each of its elements once, and only then:
    they are the differences, along all dimensions, of how many boxes an element is in.
    """
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for box in boxes:
        for corner, sign in zip(product(*box), _signs(len(box)), strict=True):
            found[corner] += sign
    return {corner: count for corner, count in found.items() if count}


@cache
def _signs(rank: int) -> tuple[int, ...]:
    """Those of a box's corners: -1 where an odd number of its dimensions end."""
    return tuple(prod(signs) for signs in product((1, -1), repeat=rank))
