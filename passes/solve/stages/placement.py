"""Gives each stage its devices: covers hosts x devices with submeshes (paper, section 5.2, app. A).

Submeshes are (1, s) inside a host, where s divides the M devices of a host, or (n, M) of whole
hosts. Any submeshes that have k M devices together fill k hosts exactly, and none crosses a host's
end. The paper's theorem says so of powers of two; `_always_fill` extends it to other sizes. A
single host is filled by any sizes that have M devices together, so there s need not divide M.

Hosts of different kinds are groups (`Group`): a mesh lies inside one of them, and stages on a group
follow one another. Hosts may be left idle then, but none in part.

So any order of stages can be placed, but neighbours should lie next to each other. One after the
other, stages fill whole hosts in *blocks*: each block is the shortest sequence that ends where a
host ends. A block keeps its order if each submesh then begins at a multiple of its size (of a
host's, if it is larger); else its submeshes are placed from large to small (`_filling`). On a
single host whose devices a size does not divide, all keep their order: no end can be crossed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import accumulate, groupby, pairwise
from math import factorial, prod
from typing import NamedTuple

MOST_ORDERS = 24
"""Of hosts. Where there are more, hosts of a kind stay together. Of more than four kinds, which
have more orders still, the given order is rotated and reversed."""

MOST_SIZES = 15
"""On a single host of so many devices or fewer, a stage may have any number of them. The host then
has at most 16 meshes (sizes and logical shapes of one or two axes); one of 24 devices would have 30
in place of 11, and one of 72 devices 116 in place of 21."""

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
    """(1, 1) ... (1, M), (2, M) ... (N, M): numbers of devices in a host, and of whole hosts.

    In a host, these are the divisors of M, such as 1, 2, 3 and 6. If M is a power of two, they are
    the paper's. Divisors with which hosts might not be filled are left out (`_sizes_in_host`). On
    a single host of M <= MOST_SIZES devices, other than a power of two, they are all of 1 ... M.
    """
    sizes: Iterable[int] = _sizes_in_host(devices_per_host)
    if hosts == 1 and devices_per_host.bit_count() > 1 and devices_per_host <= MOST_SIZES:
        sizes = range(1, devices_per_host + 1)
    return (
        *((1, size) for size in sizes),
        *((n, devices_per_host) for n in range(2, hosts + 1)),
    )


def _sizes_in_host(devices: int) -> list[int]:
    """Sizes with which stages always fill any number of hosts of so many devices, ascending.

    On several hosts, a size that does not divide M is of no use: six stages of 4 devices have as
    many as four hosts of 6, and fill none. All divisors of up to 29 devices are taken. Of some
    more, such as 30, 42, 60 or 72, some are left out: stages of 15, 10, 10, 6, 6, 6, 6 and 1
    devices do not fill two hosts of 30. Powers of two and the whole host stay; of the others, the
    larger ones are preferred.
    """
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    found = {devices, *(size for size in divisors if size.bit_count() == 1)}
    for size in reversed(divisors):
        if _always_fill({*found, size}):
            found.add(size)
    return sorted(found)


def _always_fill(sizes: Set[int]) -> bool:
    """Whether a bound proves that stages of these sizes always fill hosts.

    Of the sizes, M is the largest, and the others divide it. The claim: stages that have k M
    devices together, k >= 1, can be split into k sets of M devices. Let m(s) s be the least
    multiple of s among the larger sizes. If the claim holds after m(s) stages of size s are
    replaced by one of size m(s) s, it holds before. Repeat this, and give each stage of size M a
    host, until at most m(s) - 1 stages of each size s < M are left. Together these have at most

        sum over s < M of (m(s) - 1) s

    devices, and a multiple of M. If the sum is less than 2 M, they have M devices, or none.
    If each size divides the next one, as powers of two do, the sum is M - 1.
    """
    *small, whole = sorted(sizes)
    multiples = (min(t for t in sizes if t > size and t % size == 0) for size in small)
    return sum(t - size for t, size in zip(multiples, small, strict=True)) < 2 * whole


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
    is_uneven = hosts == 1 and any(devices_per_host % size for size in sizes)
    placed: dict[int, tuple[Device, ...]] = {}
    free = 0
    for block in blocks(devices_per_host, sizes):
        is_aligned = all(before[k] % min(sizes[k], devices_per_host) == 0 for k in block)
        keeps_order = is_uneven or is_aligned
        for stage in block if keeps_order else _filling(devices_per_host, sizes, block):
            numbers = range(free, free + sizes[stage])
            placed[stage] = tuple(divmod(number, devices_per_host) for number in numbers)
            free += sizes[stage]
    return [placed[stage] for stage in range(len(sizes))]


def _filling(devices_per_host: int, sizes: Sequence[int], block: Sequence[int]) -> list[int]:
    """The stages of a block in an order in which none crosses a host's end, large ones first.

    A stage may come next if some of the others fill the rest of its host. Then whole hosts are left
    for what remains, so by `_always_fill` no stage has to be taken back. If possible, the stage
    begins at a multiple of its size: 3, 1 and 2 devices follow one another. On hosts of up to 32
    devices it did in all cases that were tried.
    """
    found: list[int] = []
    left, used = sorted(block, key=lambda k: -sizes[k]), 0
    while left:
        by_size = {sizes[stage]: stage for stage in reversed(left)}
        room = -used % devices_per_host
        fitting = [
            size
            for size, stage in by_size.items()
            if room == 0 or size <= room
            if _has_sum((sizes[k] for k in left if k != stage), (room - size) % devices_per_host)
        ]
        size = max(fitting, key=lambda it: (used % min(it, devices_per_host) == 0, it))
        found.append(by_size[size])
        left.remove(by_size[size])
        used += size
    return found


def _has_sum(numbers: Iterable[int], total: int) -> bool:
    """Whether some of the numbers, or none of them, have this sum."""
    sums = 1  # Bit r: some of them have the sum r.
    for number in numbers:
        sums |= sums << number
    return bool(sums >> total & 1)


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
