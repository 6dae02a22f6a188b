"""Chooses the sender of each part of a tensor among the devices that hold it.

Each demand is sent by one device. The objective is, first, the largest number of bytes that any
host sends over its slow links, then the largest number that any device sends. Both are makespans:
demands are jobs, hosts or devices are machines, and each job can run on some of the machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension of a tensor, half-open"""


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


def balance(demands: Sequence[Demand], hosts: Mapping[int, int]) -> tuple[int, ...]:
    """Senders chosen one after the other, each the host and the device with the least to send.

    Demands without a choice come first, then large ones before small ones. Where n hosts hold all,
    no host sends more than 4/3 - 1 / (3n) of the least possible (Graham, 1969).
    """
    by_host: Counter[int] = Counter()
    by_device: Counter[int] = Counter()
    chosen = [0] * len(demands)

    def size(number: int) -> tuple[bool, int, int]:
        demand = demands[number]
        return len(demand.senders) > 1, -demand.num_bytes, len(demand.senders)

    for number in sorted(range(len(demands)), key=size):
        demand = demands[number]

        def load(device: int, slow: bool = demand.slow) -> tuple[int, int]:
            return by_host[hosts[device]] if slow else 0, by_device[device]

        sender = min(demand.senders, key=load)
        chosen[number] = sender
        by_device[sender] += demand.num_bytes
        if demand.slow:
            by_host[hosts[sender]] += demand.num_bytes
    return tuple(chosen)
