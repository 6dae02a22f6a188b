"""Gives each stage its devices: covers hosts x devices with submeshes (paper, section 5.2, app. A).

Submeshes are (1, 2^p) inside a host, where 2^p divides the M devices of a host, or (n, M) of whole
hosts. Placed from large to small, each behind the one before, they leave no gap (the theorem of
appendix A, where M itself is a power of two): whole hosts come first, and since each size inside a
host divides those before it, the next free device is always a multiple of the next size. So no
submesh crosses a host's end, and any that have N M devices together cover the cluster.

Hosts of different kinds are groups (`Group`): a mesh lies inside one of them, and stages on a group
follow one another. Hosts may be left idle then, but none in part.

So any order of stages can be placed, but neighbours should lie next to each other. One after the
other, stages fill whole hosts in *blocks*: each block is the shortest sequence that ends where a
host ends. A block keeps its order if each submesh then begins at a multiple of its size (of a
host's, if it is larger); else its submeshes are placed from large to small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import factorial, prod
from typing import NamedTuple

MOST_ORDERS = 24
"""Of hosts. Where there are more, hosts of a kind stay together. Of more than four kinds, which
have more orders still, the given order is rotated and reversed."""

FEW_HOSTS = 8
"""On so many hosts, all numbers of hosts are tried."""
_SMALLEST = 8
"""On more, the smallest stage has so many times fewer devices than an even share."""

Device = tuple[int, int]
"""(host, device in the host)"""


class Group(NamedTuple):
    """Equal hosts that follow one another in the pipeline."""

    kind: int
    hosts: int
    devices_per_host: int

    @property
    def num_devices(self) -> int:
        """Of all its hosts."""
        return self.hosts * self.devices_per_host


def orders(kinds: Sequence[tuple[int, int]]) -> Iterator[tuple[Group, ...]]:
    """The orders of hosts in a pipeline, as groups; neighbouring groups are of different kinds.

    Args:
        kinds: hosts and devices per host of each kind.
    """
    counts = [hosts for hosts, _ in kinds]
    few = len(kinds) > 1 and factorial(sum(counts)) <= MOST_ORDERS * prod(map(factorial, counts))
    if factorial(len(kinds)) > MOST_ORDERS:
        found = _turns(len(kinds))
    else:
        found = _orders(counts if few else [1] * len(counts))
    for order in found:
        yield tuple(
            Group(kind, len([*same]) if few else counts[kind], kinds[kind][1])
            for kind, same in groupby(order)
        )


def _turns(count: int) -> Iterator[tuple[int, ...]]:
    """So many kinds in their order, from each of them on, forwards and backwards."""
    order = tuple(range(count))
    for turned in (order, order[::-1]):
        for first in range(count):
            yield turned[first:] + turned[:first]


def _orders(left: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All orders of kinds, of which so many are left each."""
    if not any(left):
        yield ()
    for kind, count in enumerate(left):
        if count:
            for rest in _orders([*left[:kind], count - 1, *left[kind + 1 :]]):
                yield kind, *rest


def submeshes(hosts: int, devices_per_host: int) -> tuple[tuple[int, int], ...]:
    """(1, 1), (1, 2), (1, 4) ... (1, M), (2, M) ... (N, M), as in the paper.

    Hosts of M = 6 devices are used by 1, 2 or 6: with submeshes of 4, some could not be covered.
    """
    powers = (1 << p for p in range(devices_per_host.bit_length()))
    inside = {*(power for power in powers if devices_per_host % power == 0), devices_per_host}
    return (
        *((1, size) for size in sorted(inside)),
        *((n, devices_per_host) for n in range(2, hosts + 1)),
    )


def few_submeshes(hosts: int, devices_per_host: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Those of `submeshes` from which up to `stages` stages are searched; all on up to `FEW_HOSTS`.

    On more hosts, their number grows with the logarithm of the devices. A stage then has about 1/8
    of an even share of the devices or more: a multiple of a power of two. It has a number of hosts
    that divides all of them, or that has three significant bits (1, 2, ..., 8, 10, 12, 14, 16, 20,
    ...).
    """
    every = submeshes(hosts, devices_per_host)
    if hosts <= FEW_HOSTS:
        return every
    whole, unit = hosts * devices_per_host, 1
    while whole % (2 * unit) == 0 and 2 * unit * _SMALLEST * stages <= whole:
        unit *= 2

    def is_taken(n: int, m: int) -> bool:
        if m == devices_per_host and hosts % n == 0 and hosts // n <= stages:
            return True
        return n * m % unit == 0 and n % (1 << max(0, n.bit_length() - 3)) == 0

    return tuple(it for it in every if is_taken(*it))


def place(
    hosts: int, devices_per_host: int, shapes: Sequence[tuple[int, int]]
) -> list[tuple[Device, ...]]:
    """The devices of each submesh, in the order of ``shapes``; every device is used once.

    Args:
        hosts: of the cluster.
        devices_per_host: of the cluster.
        shapes: some of ``submeshes``, which have as many devices together as the cluster.
    """
    sizes = [n * m for n, m in shapes]
    before = list(accumulate(sizes, initial=0))
    placed: dict[int, tuple[Device, ...]] = {}
    free = 0
    for block in blocks(devices_per_host, sizes):
        moved = any(before[k] % min(sizes[k], devices_per_host) for k in block)
        for stage in sorted(block, key=lambda k: -sizes[k]) if moved else block:
            numbers = range(free, free + sizes[stage])
            placed[stage] = tuple(divmod(number, devices_per_host) for number in numbers)
            free += sizes[stage]
    return [placed[stage] for stage in range(len(sizes))]


def place_on_kinds(
    kinds: Sequence[tuple[int, int]],
    shapes: Sequence[tuple[int, int]],
    kind_of: Sequence[int],
) -> list[tuple[Device, ...]]:
    """The devices of each submesh on hosts of several kinds, which are numbered kind by kind.

    Submeshes in a row on one kind use whole hosts, the first ones that are free.

    Args:
        kinds: hosts and devices per host of each kind.
        shapes: the submeshes in the order of the stages.
        kind_of: the kind of each.
    """
    free = [0, *accumulate(hosts for hosts, _ in kinds)][:-1]
    placed: list[tuple[Device, ...]] = []
    for kind, run in groupby(zip(kind_of, shapes, strict=True), key=lambda it: it[0]):
        mine = [shape for _, shape in run]
        hosts = sum(n * m for n, m in mine) // kinds[kind][1]
        for found in place(hosts, kinds[kind][1], mine):
            placed.append(tuple((free[kind] + host, device) for host, device in found))
        free[kind] += hosts
    return placed


def blocks(devices_per_host: int, sizes: Sequence[int]) -> list[range]:
    """The stages of each block, by the number of devices of each stage."""
    ends = [
        stage
        for stage, used in enumerate(accumulate(sizes), start=1)
        if used % devices_per_host == 0
    ]
    return [range(begin, end) for begin, end in pairwise([0, *ends])]
