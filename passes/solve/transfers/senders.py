"""Chooses the sender of each part of a tensor among the devices that hold it.

Each demand is sent by one device. The objective is, first, the largest number of bytes that any
host sends over its slow links, then the largest number that any device sends. Both are makespans:
demands are jobs, hosts or devices are machines, and each job can run on some of the machines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension of a tensor, half-open"""

_EXACT_DEMANDS = 16
"""Up to this number of demands with several senders, the search is exact; above, greedy."""
_EXACT_NODES = 5000
"""Node limit of that search, tens of milliseconds. The result is optimal if it is not reached."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """A box that a device of the destination gets from one of several devices."""

    target: int
    box: Box
    num_bytes: int
    """sent over links; 0 if the device already holds the box"""
    senders: tuple[int, ...]
    """devices that hold it; first the one at the same position in its mesh as ``target``"""
    slow: bool
    """whether all of them are on other hosts"""


def peak(
    demands: Sequence[Demand], hosts: Mapping[int, int], senders: Sequence[int]
) -> tuple[int, int]:
    """(most bytes that a host sends over slow links, most bytes that a device sends)."""
    by_host: Counter[int] = Counter()
    by_device: Counter[int] = Counter()
    for demand, sender in zip(demands, senders, strict=True):
        by_device[sender] += demand.num_bytes
        if demand.slow:
            by_host[hosts[sender]] += demand.num_bytes
    return max(by_host.values(), default=0), max(by_device.values(), default=0)


def balance(demands: Sequence[Demand], hosts: Mapping[int, int]) -> tuple[tuple[int, ...], bool]:
    """The sender of each demand, so that ``peak`` is small, and whether it is known to be least.

    Each device receives from its counterpart unless ``greedy`` gives a smaller peak. Small problems
    are then searched exactly.
    """
    least = _least_peak(demands, hosts)
    best = tuple(demand.senders[0] for demand in demands)
    if peak(demands, hosts, best) == least:
        return best, True
    best = min(best, greedy(demands, hosts), key=lambda senders: peak(demands, hosts, senders))
    if peak(demands, hosts, best) == least:
        return best, True
    if sum(len(demand.senders) > 1 for demand in demands) > _EXACT_DEMANDS:
        return best, False
    return _SenderSearch(demands, hosts, least, best).run()


def greedy(demands: Sequence[Demand], hosts: Mapping[int, int]) -> tuple[int, ...]:
    """Senders chosen one after the other, each the host and the device with the least to send.

    Demands without a choice come first, then large ones before small ones. Where n hosts hold all,
    no host sends more than 4/3 - 1 / (3n) of the least possible (Graham, 1969).
    """
    by_host: Counter[int] = Counter()
    by_device: Counter[int] = Counter()
    chosen: dict[int, int] = {}
    for number in _by_size(demands):
        demand = demands[number]

        def load(device: int, slow: bool = demand.slow) -> tuple[int, int]:
            return by_host[hosts[device]] if slow else 0, by_device[device]

        sender = min(demand.senders, key=load)
        chosen[number] = sender
        by_device[sender] += demand.num_bytes
        if demand.slow:
            by_host[hosts[sender]] += demand.num_bytes
    return tuple(chosen[number] for number in range(len(demands)))


def _by_size(demands: Sequence[Demand]) -> list[int]:
    """Demands without a choice first, then large ones before small ones."""

    def key(number: int) -> tuple[bool, int, int]:
        demand = demands[number]
        return len(demand.senders) > 1, -demand.num_bytes, len(demand.senders)

    return sorted(range(len(demands)), key=key)


def _least_peak(demands: Sequence[Demand], hosts: Mapping[int, int]) -> tuple[int, int]:
    """A bound on ``peak`` from below."""
    slow = [
        (demand.num_bytes, frozenset(hosts[sender] for sender in demand.senders))
        for demand in demands
        if demand.slow
    ]
    return _least_load(slow), _least_load([(d.num_bytes, frozenset(d.senders)) for d in demands])


def _least_load(jobs: list[tuple[int, frozenset[int]]]) -> int:
    """A lower bound of the largest load, when each job goes to one machine of its set.

    If a set of jobs can run only on m machines, some machine has at least their average, and some
    machine has at least k + 1 of the largest k m + 1 of them.
    """
    by_set: dict[frozenset[int], list[int]] = defaultdict(list)
    for size, machines in jobs:
        by_set[machines].append(size)
    least = 0
    for machines in {*by_set, frozenset[int]().union(*by_set)}:
        inside = [s for other, sizes in by_set.items() if other <= machines for s in sizes]
        inside.sort(reverse=True)
        sums = [0, *accumulate(inside)]
        count = max(1, len(machines))
        fullest = (sums[j + 1] - sums[j - j // count] for j in range(0, len(inside), count))
        least = max(least, -(-sums[-1] // count), *fullest)
    return least


class _SenderSearch:
    """Branch and bound over the senders of demands, the largest first."""

    def __init__(
        self,
        demands: Sequence[Demand],
        hosts: Mapping[int, int],
        least: tuple[int, int],
        start: tuple[int, ...],
    ) -> None:
        self._demands = demands
        self._hosts = hosts
        self._least = least
        self._best = start
        self._peak = peak(demands, hosts, start)
        self._order = _by_size(demands)
        self._chosen = list(start)
        self._by_host: Counter[int] = Counter()
        self._by_device: Counter[int] = Counter()
        self._nodes = 0
        # Devices of a host that can send the same demands are interchangeable.
        uses: dict[int, list[int]] = defaultdict(list)
        for number, demand in enumerate(demands):
            for sender in demand.senders:
                uses[sender].append(number)
        self._kind = {device: (hosts[device], tuple(used)) for device, used in uses.items()}

    def run(self) -> tuple[tuple[int, ...], bool]:
        """The best senders found, and whether they are proven optimal."""
        self._visit(0, (0, 0))
        return self._best, self._nodes <= _EXACT_NODES

    def _visit(self, depth: int, high: tuple[int, int]) -> None:
        self._nodes += 1
        bound = max(high[0], self._least[0]), max(high[1], self._least[1])
        if self._nodes > _EXACT_NODES or bound >= self._peak:
            return
        if depth == len(self._order):
            self._best, self._peak = tuple(self._chosen), high
            return
        number = self._order[depth]
        demand = self._demands[number]
        tried: set[tuple[object, int]] = set()
        for sender in sorted(demand.senders, key=self._load):
            kind = self._kind[sender], self._by_device[sender]
            if kind in tried:
                continue
            tried.add(kind)
            slow = demand.num_bytes if demand.slow else 0
            self._by_host[self._hosts[sender]] += slow
            self._by_device[sender] += demand.num_bytes
            self._chosen[number] = sender
            by_host, by_device = self._load(sender)
            self._visit(depth + 1, (max(high[0], by_host), max(high[1], by_device)))
            self._by_host[self._hosts[sender]] -= slow
            self._by_device[sender] -= demand.num_bytes

    def _load(self, device: int) -> tuple[int, int]:
        return self._by_host[self._hosts[device]], self._by_device[device]
