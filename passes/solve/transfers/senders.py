"""Chooses the sender of each part of a tensor among the devices that hold it.

Each demand is sent by one device. The objective is, first, the largest number of bytes that any
host sends over its slow links, then the largest number that any device sends. Both are makespans:
demands are jobs, hosts or devices are machines, and each job can run on some of the machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Parts of a tensor, each of which a device of the destination gets from one of several."""

    num_bytes: Integers
    """[demand]: sent over links; 0 if the device already holds the part"""
    slow: np.ndarray[Any, np.dtype[np.bool_]]
    """[demand]: whether all that hold it are on other hosts"""
    senders: Integers
    """the devices that hold it, demand after demand; with equal loads the first one is taken"""
    ends: Integers
    """[demand]: where its devices in ``senders`` end"""


def balance(demands: Demands, host_of: Integers) -> Integers:
    """The sender of each demand, chosen one after the other: the host, then the device, that has
    the least to send. ``host_of`` has the host of each device.

    Demands without a choice come first, then large ones before small ones. Where n hosts hold all,
    no host sends more than 4/3 - 1 / (3n) of the least possible (Graham, 1969).
    """
    num_bytes, slow = demands.num_bytes, demands.slow
    starts = np.concatenate([[0], demands.ends[:-1]])[: len(demands.ends)]
    counts = demands.ends - starts
    chosen = demands.senders[starts]
    by_device = np.zeros(len(host_of), np.int64)
    by_host = np.zeros(1 + host_of.max(initial=0), np.int64)
    single = counts == 1
    np.add.at(by_device, chosen[single], num_bytes[single])
    np.add.at(by_host, host_of[chosen[single & slow]], num_bytes[single & slow])
    (free,) = np.nonzero(~single)
    for number in free[np.lexsort((counts[free], -num_bytes[free]))]:
        senders = demands.senders[starts[number] : demands.ends[number]]
        if slow[number]:
            loads = by_host[host_of[senders]]
            senders = senders[loads == loads.min()]
        sender = senders[by_device[senders].argmin()]
        chosen[number] = sender
        by_device[sender] += num_bytes[number]
        if slow[number]:
            by_host[host_of[sender]] += num_bytes[number]
    return chosen
